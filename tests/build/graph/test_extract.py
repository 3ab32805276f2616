"""``graph extract``: layers of the micro model as artifacts of their own, whose vectors hold."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner

from ling3export.artifacts.calibration import beside, read_calibration
from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.store import Store
from ling3export.cli.main import main
from ling3export.compile.extract import layer_range, sliced
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import ConfigError, PlanError
from ling3export.model.config import Config
from ling3export.plan.recorded import config_fields, config_of

LAYERS = [0, 1, 3]  # KDA and dense, KDA and MoE, MLA and MoE; other layers are of one of these kinds


def extracted(artifact, folder, layers, cell="decode@8"):
    out = folder / "layer.ling3"
    said = CliRunner().invoke(main, ["graph", "extract", str(artifact), cell, str(out), "--layers", layers])
    assert said.exit_code == 0, said.output
    return out


def share(manifest, layers):
    """Bytes of some layers in the store of an artifact."""
    config = config_of(manifest)
    total = 0
    for name, tensor in manifest.weights.index.items():
        stack = name.split(".")[0]
        if stack == "embeddings":
            continue
        of = range(config.num_hidden_layers) if stack == "layers" else config.layers(stack)
        axis = 1 if tensor.shards else 0
        row = math.prod((*tensor.shape[:axis], *tensor.shape[axis + 1 :])) * BY_NAME[tensor.dtype].nbytes
        total += row * sum(layer in of for layer in layers)
    return total


@pytest.mark.parametrize(
    "layer", [layer if layer in LAYERS else pytest.param(layer, marks=pytest.mark.extras) for layer in range(8)]
)
def test_a_layer_is_an_artifact_whose_vectors_hold(artifact, tmp_path, layer):
    whole = artifact("micro-tp2")
    out = extracted(whole, tmp_path, str(layer))
    before, manifest = read_manifest(whole), read_manifest(out)
    config = config_of(manifest)
    assert (config.attention_kinds, config.mlp_kinds) == (
        (config_of(before).attention_kinds[layer],),
        (config_of(before).mlp_kinds[layer],),
    )
    receipts = manifest.vectors.receipts["cpu-tp2"]
    assert receipts.passed and receipts.cells["decode@8"].positions == 14
    assert max(cell.relative for name, cell in receipts.cells.items()) < 1e-5
    assert {name.partition("@")[0] for name in receipts.cells} == {"prefill", "decode", "sample", "logits_processor"}
    own = sum(each.nbytes for name, each in manifest.weights.index.items() if not name.startswith("embeddings."))
    assert own == share(before, [layer])
    same_rows(Store(whole, before.weights.index), config_of(before), Store(out, manifest.weights.index), layer)


def same_rows(whole, config, part, layer):
    """Every stored tensor of the layer has the bytes of its row in the whole stack."""
    for name, tensor in part.index.items():
        stack = name.split(".")[0]
        if stack != "embeddings":
            row = layer if stack == "layers" else config.layers(stack).index(layer)
            axis = 1 if tensor.shards else 0
            np.testing.assert_array_equal(part.view(name), np.take(whole.view(name), [row], axis), name)


@pytest.mark.extras
def test_a_range_of_quantized_layers_is_verified_and_timed(artifact, tmp_path):
    out = extracted(artifact("micro-tp2-int4"), tmp_path, "2-4", "prefill@16")
    said = CliRunner().invoke(main, ["verify", str(out), "--time"])
    assert said.exit_code == 0, said.output
    times = read_calibration(beside(out))
    assert times.cells["prefill@16"].median > 0 and times.receipts.passed


def test_a_slice_has_the_kinds_and_the_shards_of_its_layers(artifact):
    config = config_of(read_manifest(artifact("micro-tp2")))
    for first, count in ((0, 1), (1, 2), (3, 1), (2, 4), (0, 8)):
        part = sliced(config, first, count, 84)
        assert part.attention_kinds == config.attention_kinds[first : first + count]
        assert part.mlp_kinds == config.mlp_kinds[first : first + count]
        assert part.tp_shards == config.tp_shards and part.vocab_size >= 84 and part.groups == 0


def test_layers_that_the_model_does_not_have_are_refused(artifact):
    config = config_of(read_manifest(artifact("micro-tp2")))
    assert layer_range("7", config) == (7, 1) and layer_range("2-4", config) == (2, 3)
    for text in ("8", "-1", "4-2", "x", "1-8", "", "1-2-3"):
        with pytest.raises(PlanError, match="--layers"):
            layer_range(text, config)


def test_the_layers_with_mla_may_be_named_in_the_config(artifact):
    fields = config_fields(read_manifest(artifact("micro-tp2")))
    named = Config.from_dict(fields | {"full_attn_layers": [0, 5]})
    assert named.attention_kinds == ("mla", "kda", "kda", "kda", "kda", "mla", "kda", "kda")
    assert Config.from_dict(fields | json.loads(json.dumps(named.semantic()))) == named
    for wrong in ([8], [2, 1], ["a"], 3):
        with pytest.raises(ConfigError, match="full_attn_layers"):
            Config.from_dict(fields | {"full_attn_layers": wrong})

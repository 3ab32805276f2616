"""``graph bisect``: the layer in which a mistake is planted is named."""

import functools

import jax
import numpy as np
import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.store import Store
from ling3export.checkpoint.reader import Checkpoint
from ling3export.model.decoder import Ling3
from ling3export.model.parameters import expected_tensors
from ling3export.model.program import build_step, put
from ling3export.plan.recorded import config_of, plan_of
from ling3export.verify.bisect import FLOAT32, STATES, bisect, compare, expected
from ling3export.verify.dequantized import Dequantized
from ling3export.verify.probe import loaded_for, probe
from ling3export.verify.stored import StoredWeights
from tools.campaigns import mistakes


@pytest.mark.parametrize("name", ["micro-tp2", "micro-tp4-flat"])
def test_a_store_read_backwards_is_the_checkpoint(artifact, name):
    folder = artifact(name)
    manifest, source = read_manifest(folder), Checkpoint.open(artifact.checkpoint(name))
    config = config_of(manifest)
    stored = StoredWeights(Store(folder, manifest.weights.index), config, manifest.plan.forms)
    for tensor in expected_tensors(config):
        np.testing.assert_array_equal(stored.tensor(tensor), source.tensor(tensor).astype(np.float32), tensor)


@pytest.mark.parametrize("cell", ["decode@8", "prefill@128"])
def test_an_artifact_agrees_with_the_reference_in_every_layer(artifact, cell):
    found = bisect(artifact("micro-tp2"), None, cell)
    print(found.table())
    assert found.first is None


class Planted:
    """The artifact micro-tp1, loaded in this process, with programs whose layer ``layer`` has a mistake.

    Which layer is an argument of the program, so that each mistake is compiled once.
    """

    def __init__(self, folder):
        self.folder, self.manifest = folder, read_manifest(folder)
        self.config, (self.target,) = config_of(self.manifest), self.manifest.targets
        self.sequences = self.manifest.vectors.sequences[-1:]  # the longest one: four chunks, then two tokens
        self.layer = -1

    def bisect(self, phase, plant, layers):
        """By layer, what is found where that layer has the mistake; -1 for none."""
        cell = {"prefill": "prefill@128", "decode": "decode@8"}[phase]
        loaded = loaded_for(self.folder, self.target, cell, portable=False)
        loaded.runner.cells[cell].program = self.program(loaded, cell, plant)
        wanted = self.wanted(phase)
        found = {}
        for layer in (-1, *layers):
            self.layer = layer
            values = dict(probe(loaded, cell, self.sequences, self.config.num_hidden_layers))
            sides = "planted", "reference"
            found[layer] = compare(values, wanted, self.config, len(self.sequences), sides, cell, "largest", FLOAT32)
        return found

    @functools.cache  # noqa: B019
    def wanted(self, phase):
        return expected(self.manifest, self.folder, phase, self.sequences)

    def program(self, loaded, cell, plant):
        record = loaded.record.cells[cell]
        geometry = plan_of(self.manifest, self.target).geometry
        mesh = loaded.runner.cells[cell].params[0].sharding.mesh
        step = build_step(self.config, geometry, record.phase, record.padding, mesh)
        right = Ling3.run_layer
        wrong_layer = []

        def run_layer(model, layer, x, state, batch):
            def wrong(x, state):
                with pytest.MonkeyPatch.context() as patch:
                    plant(patch)
                    return right(model, layer, x, state, batch)

            return jax.lax.cond(
                layer.number == wrong_layer[0], wrong, lambda x, state: right(model, layer, x, state, batch), x, state
            )

        def traced(number, *arguments):
            wrong_layer[:] = [number]
            trees = {"params": {}, "state": {}, "batch": {}}
            for leaf, value in zip(record.inputs, arguments, strict=True):
                put(trees[leaf.group], tuple(leaf.name.split(".")), value)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Ling3, "run_layer", run_layer)
                state, out = step.call(*trees.values())
            groups = {"state": state, "out": out}
            return tuple(groups[leaf.group][leaf.name] for leaf in record.outputs)

        compiled = jax.jit(traced)
        return lambda *arguments: compiled(np.int32(self.layer), *arguments)


@pytest.fixture(scope="module")
def planted(artifact):
    return Planted(artifact("micro-tp1"))


IN_MLA = ("SiLU instead of sigmoid gate, MLA", "NeoX-style rope", "MLA gate after dense")
IN_MOE = (
    "bias in the expert weights",
    "group score by max",
    "scaling twice",
    "scaling missing",
    "shared expert missing",
    "shared expert scaled",
)
# Changes the experts of few tokens. In prefill only ends of chunks have logits: others show in the next layer's state.
SPARSE = "group score by max"
QUICK = (("conv reversed", "prefill"),)


def next_state(config, layer):
    """The state arrays of a layer; none after the last one."""
    return STATES[config.attention_kinds[layer]] if layer < config.num_hidden_layers else ()


@pytest.mark.jit
@pytest.mark.parametrize(
    ("mistake", "phase"),
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.extras) for row in mistakes.PLANTED],
)
def test_a_mistake_in_one_layer_is_found_there(planted, mistake, phase):
    kind = "mla" if mistake in IN_MLA else "moe" if mistake in IN_MOE else "kda"
    names, layers = (kind, *STATES.get(kind, ())), planted.config.layers(kind)
    found = planted.bisect(phase, mistakes.MISTAKES[mistake], layers)
    assert found.pop(-1).first is None and found.keys() == {*layers}
    for layer, result in found.items():
        if mistake == SPARSE and layer + 1 == planted.config.num_hidden_layers and result.first is None:
            continue  # after the last layer no state shows it, and no chunk ends with such a token
        assert result.first is not None, (layer, result.table())
        first = result.first
        if mistake == SPARSE and first.what in next_state(planted.config, layer + 1):
            assert first.layer == layer + 1 and f"or layer {layer}, " in result.table(), (layer, result.table())
        else:
            assert first.layer == layer and first.what in names, (layer, result.table())


@pytest.mark.parametrize("name", ["micro-tp2-int4", pytest.param("micro-tp2-int4-small", marks=pytest.mark.extras)])
def test_quantized_weights_are_read_as_the_values_that_they_stand_for(artifact, name):
    """Routed experts have 4 bits, other matrices 8; the reference of the receipts computes with the same values."""
    folder = artifact(name)
    manifest = read_manifest(folder)
    config, forms = config_of(manifest), manifest.plan.forms
    stored = StoredWeights(Store(folder, manifest.weights.index), config, forms)
    source = Dequantized(Checkpoint.open(artifact.checkpoint(name)), forms)
    for tensor in expected_tensors(config):
        expected = np.asarray(source.tensor(tensor)[:], np.float32)
        np.testing.assert_array_equal(stored.tensor(tensor).astype(np.float32), expected, tensor)


@pytest.mark.extras
@pytest.mark.parametrize("cell", ["prefill@16", "decode@1"])
def test_int8_and_int4_against_bf16_differ_from_the_first_layer_on(artifact, cell):
    """All matrices but the routed experts have 8 bits. Both artifacts call native kernels."""
    quantized, plain = artifact("micro-tp1-kernels-int4"), artifact("micro-tp1-kernels")
    found = bisect(quantized, plain, cell, tolerance=0.3)
    assert found.first is None and found.measure == "median" and not found.equal, found.table()
    assert found.differences[-1].error > found.differences[0].error > 1e-3  # rounding adds up
    closer = bisect(quantized, plain, cell, tolerance=1e-3)
    assert closer.first is not None and closer.first.layer in (None, 0)


def test_the_portable_program_of_a_tpu_agrees_with_the_program_of_the_processor(artifact, tpu_artifact):
    found = bisect(artifact("micro-tp1-kernels"), tpu_artifact, "prefill@16")
    assert found.sides[1].endswith("(portable program)") and found.first is None, found.table()


@pytest.mark.extras
def test_another_tp_computes_the_same(artifact):
    found = bisect(artifact("micro-tp2"), artifact("micro-tp4"), "decode@8")
    assert found.first is None and 0 < found.differences[-1].worst < FLOAT32
    assert bisect(artifact("micro-tp2"), artifact("micro-tp2"), "decode@8").equal

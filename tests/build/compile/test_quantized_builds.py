"""Artifacts with quantized weights, from checkpoint to text, and INT4 checkpoints, stored as they are."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ling3export.artifacts.parameters import FORMS, WEIGHTS
from ling3export.artifacts.records import to_json
from ling3export.artifacts.store import Store
from ling3export.checkpoint.convert import convert, store_bytes, store_files
from ling3export.checkpoint.load_plan import load_plan
from ling3export.checkpoint.quantize import dequantized
from ling3export.checkpoint.reader import Checkpoint
from ling3export.checkpoint.synth import config_fields, synthesize
from ling3export.cli.main import main
from ling3export.compile.build import named
from ling3export.foundation.errors import CheckpointError, PlanError
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.model.parameters import MATRICES, parameters, weight_table
from ling3export.plan import pricing
from ling3export.plan.options import Options
from ling3export.plan.plan import as_stored, make_plan, weight_forms
from ling3export.verify.dequantized import Dequantized
from ling3export.verify.verify import verify_artifact
from tests.support.artifacts_fixture import Artifacts
from tests.support.refusals import refusal, said
from tests.support.shards import put

NAME = "micro-tp2-int4"
Q = ("int8", "uint8")


def of_rows(index: dict[str, np.ndarray], row, layer: int, shard: int) -> np.ndarray:
    """Dequantizes a TP shard of a layer, ``[..., out, in]``, from the layout in FORMAT.md."""
    q, scale = index[f"{row.name}.q"][shard, layer], index[f"{row.name}.scale"][shard, layer]
    if q.dtype == np.uint8:
        groups = q.reshape(*scale.shape, -1)
        q = np.concatenate([groups & 15, groups >> 4], -1).astype(np.int8).reshape(*q.shape[:-1], -1)
        q = np.array(FORMS[row.form].values, np.int8)[q] if FORMS[row.form].values else q - 8
    if scale.dtype == np.uint16:
        both = np.stack([scale >> 5 & 31, scale & 31], -1).astype(np.int32)
        factors = np.where(both < 16, both, both - 32) * 2.0 ** ((scale >> 10).astype(np.int32) - 48)[..., None]
        scale = factors.reshape(*scale.shape[:-1], -1)
    scale = scale.astype(np.float32)
    if scale.ndim < q.ndim:
        return q * scale[..., None]
    return (q.reshape(*scale.shape, -1) * scale[..., None]).reshape(q.shape)


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts are in INT4, as published."""
    folder = tmp_path_factory.mktemp("int4") / "checkpoint"
    synthesize(folder, "micro", 0, layers=2, form="int4", overrides={"layer_group_size": 2})
    return folder


@pytest.mark.parametrize("weights", [name for name in WEIGHTS if name != "bf16"])
def test_the_store_holds_what_whole_tensors_are_rounded_to(tmp_path: Path, weights: str):
    """This includes row-parallel tensors, whose TP shards of 8, 16 and 40 inputs cut through groups of 32."""
    synthesize(tmp_path / "checkpoint", "micro", 3, layers=2, overrides={"layer_group_size": 2})
    source = Checkpoint.open(tmp_path / "checkpoint")
    index = convert(source, tmp_path / "store", "bfloat16", weights=weights)
    store, plain = Store(tmp_path / "store", index), Dequantized(source, weights)
    found = {name: store.view(name) for name in index}
    rows = {row.name: row for row in weight_table(source.config, weights)}
    expected = lambda name: np.asarray(plain.tensor(name).astype(np.float32))  # noqa: E731
    shards = source.config.tp_shards
    if rows["kda.o_proj"].form != "bf16":
        for name, tensor in (
            ("kda.o_proj", "model.layers.0.attention.o_proj.weight"),
            ("dense.down_proj", "model.layers.0.mlp.down_proj.weight"),
            ("moe.shared_down_proj", "model.layers.1.mlp.shared_experts.down_proj.weight"),
        ):
            parts = [of_rows(found, rows[name], 0, shard) for shard in range(shards)]
            assert np.array_equal(np.concatenate(parts, axis=-1), expected(tensor)), name
    expert = of_rows(found, rows["moe.experts_gate_up_proj"], 0, 1)[2]  # the third of shard 1's four experts
    for at, name in enumerate(("gate", "up")):
        assert np.array_equal(expert[at], expected(f"model.layers.1.mlp.experts.6.{name}_proj.weight"))
    assert set().union(*store_files(source.config, "bfloat16", weights).values()) == set(index)
    router = "model.layers.1.mlp.gate.weight"
    assert np.array_equal(found["moe.gate"][0], source.tensor(router)) and "moe.gate.q" not in index


@pytest.mark.parametrize("tp", [1, 2, 4, 16])
@pytest.mark.parametrize("weights", list(WEIGHTS))
def test_arguments_are_q_and_scale_of_each_matrix_in_flattening_order(weights: str, tp: int):
    config = Config.from_dict(config_fields("small", {}))
    for form in ("loops", "tiles"):
        geometry = Geometry(tp, "bfloat16", 1, 1, 16, 1, config.latent_dim, form=form, weights=weights)
        rows = parameters(config, geometry)
        assert [row.path for row in rows] == sorted(row.path for row in rows)
        assert all(row.shape[0] % tp == 0 for row in rows if row.spec)
        quantized = {".".join(row.path[:2]) for row in rows if row.path[-1] in ("q", "scale")}
        experts = {name for name in MATRICES if ".experts" in name}
        there = {".".join(row.path[:2]) for row in rows} & MATRICES
        assert quantized == {"bf16": set(), "int4-experts": experts}.get(weights, there)
        assert {row.dtype for row in rows if row.path[-1] == "q"} <= {*Q}


def test_int4_checkpoints_are_stored_bit_by_bit(int4: Path, tmp_path: Path):
    source = Checkpoint.open(int4)
    options = as_stored(Options(), int4)
    assert options.weights == "int4-experts"
    source.check_rounding("bfloat16", allow=False, weights=options.weights)
    found = Store(tmp_path, convert(source, tmp_path, "bfloat16", weights=options.weights))
    q, scale = found.view("moe.experts_down_proj.q"), found.view("moe.experts_down_proj.scale")
    for expert in range(16):
        values, scales = source.quantized(f"model.layers.1.mlp.experts.{expert}.down_proj.weight")
        mine, its = q[expert // 4, 0, expert % 4], scale[expert // 4, 0, expert % 4]
        assert its.tobytes() == scales.tobytes()
        assert np.array_equal(np.concatenate([mine & 15, mine >> 4], -1), values + 8)
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    assert np.array_equal(Dequantized(source, "int4").tensor(name), source.tensor(name))
    assert np.array_equal(dequantized(source.quantized(name)), source.tensor(name))


@pytest.fixture
def partly(tmp_path: Path) -> Path:
    """An INT4 checkpoint with one expert in bf16, according to its config."""
    folder = tmp_path / "partly"
    synthesize(folder, "micro", 0, layers=2, form="int4", overrides={"layer_group_size": 2})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["re:.*\\.experts\\.5\\."]
    (folder / "config.json").write_text(json.dumps(config))
    for name, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
        name = f"model.layers.1.mlp.experts.5.{name}_proj.weight"
        values = np.random.default_rng(0).normal(size=shape).astype(ml_dtypes.bfloat16)
        put(folder, f"{name}_packed", name, ("BF16", list(shape), values.tobytes()))
        for part in ("packed", "scale", "shape"):
            put(folder, name, f"{name}_{part}", None)
    return folder


def test_bf16_experts_next_to_int4_ones_are_not_rounded_silently(partly: Path, tmp_path: Path):
    """Regression: with weights stored as they are, the bf16 expert became int4 without a message."""
    source, config = Checkpoint.open(partly), Checkpoint.open(partly).config
    weights = weight_forms(as_stored(Options(), partly))
    expected = (
        r"expected all experts in int4, .* found 3 weights of 48 in bf16 .*experts.5.gate_proj(.|\n)*--allow-rounding"
    )
    with pytest.raises(CheckpointError, match=expected):
        source.check_rounding("bfloat16", allow=False, weights=weights)
    assert "found 3 weights of 48 in bf16" in refusal(main, "build", partly, tmp_path / "x.ling3", "--tp", "1")
    source.check_rounding("bfloat16", allow=True, weights=weights)
    for asked in ("int4", "int8"):
        source.check_rounding("bfloat16", allow=False, weights=asked)
    record = named(partly, {}, source)
    assert record.quantized == {"moe.experts_down_proj": 15, "moe.experts_gate_up_proj": 30}
    rows = load_plan(config, "bfloat16", weights, record.form, record.quantized)["stored"]
    (found,) = (row["from"] for row in rows if row["tensor"] == "moe.experts_down_proj.q")
    assert found["dtypes"] == ["int4", "bfloat16"]
    assert found["steps"][0].endswith(", where it is int4") and "round to int4" in found["steps"][1]


@pytest.mark.parametrize(
    ("form", "tensor", "step"),
    [
        ("int4", "moe.experts_down_proj.q", "take int4 as it is stored"),
        ("fp8", "moe.experts_down_proj", "widen float8_e4m3fn by KEY_scale_inv"),
        ("fp8", "kda.qkvfg_proj", "widen float8_e4m3fn by KEY_scale_inv"),
    ],
)
def test_the_load_plan_says_what_a_quantized_checkpoint_stores(tmp_path: Path, form: str, tensor: str, step: str):
    """Regression: the load plan reported bfloat16 for FP8 checkpoints."""
    synthesize(tmp_path / form, "micro", 0, layers=2, form=form, overrides={"layer_group_size": 2})
    source = Checkpoint.open(tmp_path / form)
    record = named(source.path, {}, source)
    weights = weight_forms(as_stored(Options(), tmp_path / form))
    rows = {
        row["tensor"]: row["from"]
        for row in load_plan(source.config, "bfloat16", weights, form, record.quantized)["stored"]
    }
    assert rows[tensor]["dtypes"] == [form] and rows[tensor]["steps"][0].startswith(step)
    assert not any("convert" in each or "round" in each for each in rows[tensor]["steps"])
    forms = {row["dtypes"][0] for row in rows.values()}
    assert forms == {form, "bfloat16", "float32"}
    assert all((key in source.forms) == (row["dtypes"] == [form]) for row in rows.values() for key in row["keys"])


def test_bf16_and_fp8_checkpoints_are_stored_in_bf16(tmp_path: Path):
    for form in ("bf16", "fp8"):
        synthesize(tmp_path / form, "micro", 0, layers=2, form=form, overrides={"layer_group_size": 2})
        assert weight_forms(as_stored(Options(), tmp_path / form)) == "bf16"
        assert as_stored(Options(weights="int8"), tmp_path / form).weights == "int8"


def test_an_unknown_form_is_refused_by_name():
    config = Config.from_dict(config_fields("micro", {}))
    with pytest.raises(PlanError, match=r"--weights: expected bf16, int8, .* or as-stored, found int2"):
        make_plan(config, Options(weights="int2"), "cpu")


def test_plan_says_how_much_each_form_takes(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config_fields("full", {})))
    told = said(main, "plan", tmp_path / "config.json", "--target", "tpu:v5e:2x2", "--json")
    forms = json.loads(told)["targets"]["tpu-v5e-2x2-tp4"]["forms"]
    for what in ("weights", "seconds"):
        found = {name: form[what] for name, form in forms.items()}
        assert found["int4-small"] < found["int4"] < found["int8-channel"] < found["int8"] < 0.6 * found["bf16"], what
    assert all(form["fits"] for form in forms.values())
    config = Config.from_dict(config_fields("full", {}))
    assert store_bytes(config, "bfloat16", "int8") < 8.6e9 and store_bytes(config, "bfloat16", "int4") < 5.0e9


@pytest.mark.parametrize(
    ("free", "words", "best"),
    [
        (
            18 << 30,
            "bf16, int8, int4, int4-small, int4-experts, int8-channel fit this machine (18.00 GiB free)",
            "bf16",
        ),
        (10 << 30, "int8, int4, int4-small, int4-experts, int8-channel fit this machine (10.00 GiB free)", "int8"),
        (6 << 30, "int4, int4-small, int4-experts fit this machine (6.00 GiB free)", "int4"),
        (5 << 30, "int4, int4-small fit this machine (5.00 GiB free)", "int4"),
        (9 << 29, "int4-small fits this machine (4.50 GiB free)", "int4-small"),
        (4 << 30, "none fits this machine (4.00 GiB free)", None),
    ],
)
def test_plan_says_which_form_fits_and_recommends_one(
    monkeypatch: pytest.MonkeyPatch, free: int, words: str, best: str | None
):
    monkeypatch.setattr(pricing, "usable_memory", lambda: (32 << 30, free))
    config = Config.from_dict(config_fields("full", {}))
    plan = pricing.priced(config, Options(tp=1, max_running=1, context=4096))
    lines = pricing.described(plan).splitlines()
    assert f"  of these, {words}, state included" in lines
    recommended = f"  recommended: --weights {best}, the least loss of those that fit"
    assert [line for line in lines if line.startswith("  recommended:")] == ([recommended] if best else [])
    assert "  recommended by a machine's memory: 8 GB: int4, 16 GB: int8, 32 GB: bf16" in lines
    (target,) = plan.targets.values()
    assert target.recommended == best
    assert target.recommended_by_memory == {"8 GB": "int4", "16 GB": "int8", "32 GB": "bf16"}
    (reads,) = (line for line in lines if line.startswith("  decode@1 reads at the least: bf16 2.1"))
    assert "int8 1.2" in reads


@pytest.mark.parametrize("form", ["int4", "int4-small"])
def test_a_quantized_artifact_verifies_in_fp32_and_says_what_it_is(artifact: Artifacts, form: str):
    """The receipts are those of fp32: 1e-5 from the plain model in float64 on the dequantized weights."""
    name = f"micro-tp2-{form}"
    folder, manifest = artifact(name), artifact.manifest(name)
    (receipts,) = verify_artifact(folder, None, engine=False).targets.values()
    assert receipts.passed and receipts.tolerance.bound == 1e-5
    assert (manifest.plan.weights, manifest.plan.forms) == (form, form)
    assert manifest.vectors.source.endswith(f"on dequantized {form} weights")
    assert manifest.targets["cpu-tp2"].geometry["weights"] == form
    config = Checkpoint.open(artifact.checkpoint(name)).config
    planned = {row["tensor"]: row for row in load_plan(config, "float32", form)["stored"]}
    assert {name: (row["shape"], row["dtype"]) for name, row in planned.items()} == {
        name: (list(tensor.shape), tensor.dtype) for name, tensor in manifest.weights.index.items()
    }
    steps = planned["moe.experts_down_proj.q"]["from"]["steps"]
    routed = WEIGHTS[form].experts
    assert steps[0] == f"round to {routed}, a scale for each group of 32 inputs: take q"


@pytest.mark.extras
@pytest.mark.parametrize("form", ["int4", "int4-small"])
def test_portable_programs_of_a_quantized_artifact_compute_the_same(artifact: Artifacts, form: str):
    (receipts,) = verify_artifact(artifact(f"micro-tp2-{form}"), None, portable=True).targets.values()
    assert receipts.passed


def test_a_quantized_artifact_generates(artifact: Artifacts):
    from ling3export.runners.cli.main import main as runner

    said(runner, "generate", artifact(NAME), "--prompt", "hello", "--max-tokens", "3")


def test_other_weights_are_attached_in_the_form_of_the_programs(artifact: Artifacts, tmp_path: Path):
    other = artifact.checkpoint("micro-tp1-seed2")
    said(main, "attach", artifact(NAME), other, tmp_path / "other.ling3")
    index = {name: each.dtype for name, each in artifact.manifest(NAME).weights.index.items()}
    from ling3export.artifacts.manifest import read_manifest

    found = read_manifest(tmp_path / "other.ling3")
    assert {name: each.dtype for name, each in found.weights.index.items()} == index
    assert found.vectors.receipts["cpu-tp2"].passed


def test_into_takes_the_form_and_refuses_another(artifact: Artifacts):
    told = refusal(main, "build", "--into", artifact(NAME), "--weights", "int8", "--target", "cpu", "--tp", "1")
    assert "--weights: expected int4, which the targets of" in told


def test_earlier_readers_find_a_field_that_they_do_not_know(artifact: Artifacts):
    """Earlier plans had no field `weights`, and stores no U8 tensors: earlier readers refuse these artifacts."""
    raw = to_json(artifact.manifest(NAME))
    assert raw["plan"]["weights"] == "int4"
    assert "weights" not in to_json(artifact.manifest("micro-tp1"))["plan"]
    assert {each["dtype"] for each in raw["weights"]["index"].values()} == {"uint8", "int8", "bfloat16", "float32"}

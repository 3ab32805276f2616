"""Artifacts whose executables call native kernels: the kernels' files, the processors that need them, and errors."""

import platform
import shutil
from dataclasses import replace

import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.checkpoint.synth import config_fields
from ling3export.cli import main as cli
from ling3export.compile.kernels import library_of
from ling3export.foundation.errors import PlanError
from ling3export.model.config import Config
from ling3export.model.native import calls
from ling3export.plan import kernels
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from ling3export.runners.cli import main as runner_cli
from tests.support.refusals import refusal

FULL = Config.from_dict(config_fields("full", {}))
RUN = ("--prompt-ids", "1,2,3", "--max-tokens", "2")


@pytest.fixture(scope="module")
def whole(artifact):
    if kernels.compiler() is None:
        pytest.skip("no C++ compiler")
    return artifact("micro-tp1-kernels")


def test_programs_with_kernels_pass_the_receipts_of_those_without(whole):
    """The expectations are the plain model's; each cell is compared in a process that has registered the kernels."""
    manifest = read_manifest(whole)
    target = manifest.targets["cpu-tp1"]
    assert manifest.vectors.receipts["cpu-tp1"].passed
    assert target.kernels is not None and target.kernels.path == "programs/cpu-tp1/kernels.so"
    level = kernels.level_of(target.kernel_names)
    assert set(level.features) <= set(target.requires.cpu_features)
    # The prefill's 16 rows are more than two for each of the few experts.
    experts = {"experts"} if level.name in calls.NO_UNIT else set()
    called = {
        "prefill": {"columns", "rows", "route"} | experts,
        "decode": {"columns", "rows", "experts", "route", "token", "attention"},
        "sample": {"best"},
        "logits_processor": set(),
    }
    for cell in target.cells.values():
        names = {name.removeprefix("ling3_") for name in cell.call.custom_calls if name.startswith("ling3_")}
        assert names == {f"{name}.{target.kernel_names}" for name in called[cell.phase]}
        assert b"ling3_" not in (whole / cell.stablehlo.path).read_bytes()


@pytest.mark.parametrize(
    ("without", "level"),
    [
        ({"amx_bf16"}, "avx512_bf16"),
        ({"amx_bf16", "avx512_bf16"}, "avx512_vnni"),  # Cascade Lake, Ice Lake: they once got the kernels of AVX2
        ({"amx_bf16", "avx512_bf16", "avx512_vnni"}, "avx_vnni"),  # many laptops
        ({"amx_bf16", "avx512_bf16", "avx512_vnni", "avx_vnni"}, "avx2"),
    ],
)
def test_the_level_is_the_best_that_a_processor_has(monkeypatch, without, level):
    every = {feature for each in kernels.LEVELS for feature in each.features}
    monkeypatch.setattr(kernels, "cpu_features", lambda: sorted(every - without))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert kernels.best_level().name == level


@pytest.mark.parametrize(
    ("weights", "names"),
    [("int4", {"columns_int8", "experts_int4"}), ("int4-small", {"columns_code6", "columns_code4", "experts_code4"})],
)
def test_programs_with_quantized_weights_pass_them_with_activations_of_8_bits(artifact, whole, weights, names):
    """The plain model does not round activations. XLA multiplies matrices without groups of 32 in a shard."""
    quantized = artifact(f"micro-tp1-kernels-{weights}")
    manifest = read_manifest(quantized)
    target = manifest.targets["cpu-tp1"]
    assert manifest.vectors.receipts["cpu-tp1"].passed
    assert target.geometry["activations"] == "int8"
    assert read_manifest(whole).targets["cpu-tp1"].geometry["activations"] == "bf16"
    for cell in target.cells.values():
        if cell.phase in ("prefill", "decode"):
            assert {f"ling3_{name}.{target.kernel_names}" for name in names} <= {*cell.call.custom_calls}


def test_only_kernels_round_activations():
    rounded = {"int8": "int8", "int4": "int8", "int4-small": "int8", "int4-experts": "int8"}
    rounded |= {"int8-channel": "bf16", "bf16": "bf16"}
    for weights, activations in rounded.items():
        assert make_plan(FULL, Options(tp=1, weights=weights), "cpu").geometry.activations == activations
        assert make_plan(FULL, Options(tp=1, weights=weights, kernels="off"), "cpu").geometry.activations == "bf16"


@pytest.mark.parametrize(("preset", "called"), [("micro", False), ("small", True), ("full", True)])
def test_models_of_256_and_wider_call_kernels(monkeypatch, preset, called):
    """Regression: `small` called none, so that XLA computed all 16 rows of decode@16 for two sequences."""
    monkeypatch.setattr(kernels, "compiler", lambda: ["c++"])
    plan = make_plan(Config.from_dict(config_fields(preset, {})), Options(tp=1), "cpu")
    assert bool(plan.geometry.kernels) == called


def test_damaged_kernels_are_refused_before_they_are_loaded(whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "copy.ling3")
    library = copy / "programs" / "cpu-tp1" / "kernels.so"
    library.write_bytes(b"\0" + library.read_bytes()[1:])
    for said in (refusal(runner_cli.main, "generate", copy, *RUN), refusal(cli.main, "verify", copy)):
        assert "file `programs/cpu-tp1/kernels.so`: expected sha256 " in said


def test_without_a_compiler_the_plan_names_the_missing_features(monkeypatch):
    monkeypatch.setattr(kernels, "compiler", lambda: None)
    plan = make_plan(FULL, Options(tp=1, kernels="auto"), "cpu")
    assert plan.geometry.kernels == ""
    assert any("no native kernels" in note and "is installed" in note for note in plan.notes)
    with pytest.raises(PlanError, match=r"--kernels on: no C\+\+ compiler .* is installed"):
        make_plan(FULL, Options(tp=1, kernels="on"), "cpu")


def test_a_packaged_compiler_compiles_the_kernels_if_the_system_has_none(monkeypatch, tmp_path):
    """The real package has 100 MB; a fake one with its name records its arguments."""
    package = tmp_path / "ziglang"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text(' '.join(sys.argv[1:]))\n"
    )
    monkeypatch.setattr(kernels, "COMPILERS", ())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    level = kernels.best_level()
    asked = library_of(kernels.ending(level)).decode().split()
    assert asked[0] == "c++" and {*kernels.FLAGS, *level.flags, *map(str, kernels.SOURCES)} <= {*asked}
    arm = next(each for each in kernels.LEVELS if each.name == "neon_dotprod")
    asked = library_of(kernels.ending(arm)).decode().split()  # the compiler refused -march=armv8.2-a+dotprod
    assert "-mcpu=generic+v8_2a+dotprod" in asked and not any(each.startswith("-march") for each in asked)


def test_kernels_of_another_version_are_not_built():
    with pytest.raises(PlanError, match="kernels: expected those of this version of ling3export, found avx2-0123"):
        kernels.level_of("avx2-0123")


def test_the_true_model_calls_kernels_by_default(monkeypatch):
    monkeypatch.setattr(kernels, "compiler", lambda: ["c++"])
    assert make_plan(FULL, Options(tp=1), "cpu").geometry.kernels == kernels.ending(kernels.best_level())


@pytest.mark.parametrize("options", [{"kernels": "off"}, {"dtype": "float32"}])
def test_programs_without_kernels(options):
    assert make_plan(FULL, replace(Options(tp=1), **options), "cpu").geometry.kernels == ""


def test_accelerators_have_no_kernels_of_ours():
    assert make_plan(FULL, Options(kernels="auto"), "tpu:v6e:4x4").geometry.kernels == ""

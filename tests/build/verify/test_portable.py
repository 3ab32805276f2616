"""Portable programs of any target on the processor: errors that are found, programs that cannot run or are left out."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from jax import export
from msgspec import structs

from ling3export.artifacts import schema
from ling3export.artifacts.manifest import file_record, read_checked, read_manifest, write_manifest
from ling3export.artifacts.receipts import told
from ling3export.cli import main as cli
from ling3export.compile import build, lower
from ling3export.foundation.errors import ArtifactError
from ling3export.machine import environment
from ling3export.machine.pjrt import recorded_mesh
from ling3export.machine.portable import lacking
from ling3export.model import program as steps
from ling3export.model.config import Config
from ling3export.runners.load import recompile
from ling3export.verify import measure
from ling3export.verify.measure import not_run, too_large
from tests.support import toy_artifact
from tests.support.refusals import refusal
from tests.support.tiny import tiny_fields

PASSED, FAILED = (schema.Receipt(status, 0.5, 0.5, 1.0, 3) for status in ("passed", "failed"))


def wrong_step(config, geometry, phase, padding, mesh):
    """The toy's step with logits that are a thousandth larger."""
    step = toy_artifact.build_step(config, geometry, phase, padding, mesh)
    # inside the shard_map, since a portable program contains nothing else
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "sharded", lambda body, *_: body)
        body = toy_artifact.build_step(config, geometry, phase, padding, mesh).call

    def call(params, state, batch):
        state, out = body(params, state, batch)
        return state, out | {"logits": out["logits"] * 1.001}

    return replace(step, call=steps.sharded(call, mesh, step.specs, step.out_specs))


def for_tpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the toy an artifact for a TPU, with a decode@2 whose portable program differs from its executable.

    Its other programs come from the cache, since compiling them would take a minute.
    """
    manifest = read_manifest(folder)
    (target,) = manifest.targets.values()
    mesh = recorded_mesh(target.mesh)
    with monkeypatch.context() as patch:
        patch.setattr(environment, "compiler_flags", lambda: {"XLA_FLAGS": measure.QUICK})
        for cell in target.cells.values():
            raw, executable = (
                read_checked(folder, cell.exec),
                schema.Executable(target.requires, target.mesh, cell.call),
            )
            key = recompile.cache_key(cell.stablehlo.sha256, mesh)
            recompile.store_program(recompile.cache_folder(), key, (raw, executable), pytest.fail)
        patch.setattr(lower, "build_step", wrong_step)
        config = Config.from_dict(tiny_fields(vocab_size=toy_artifact.VOCAB))
        blob = lower.lower_cell(config, toy_artifact.GEOMETRY, "decode", 2, "tpu").blob
    record = target.cells["decode@2"]
    (folder / record.stablehlo.path).write_bytes(blob)
    wrong = structs.replace(record, stablehlo=file_record(folder, record.stablehlo.path))
    cells = {
        name: structs.replace(cell, status="compiled, not executed")
        for name, cell in (target.cells | {"decode@2": wrong}).items()
    }
    target = structs.replace(target, platform="tpu", kind="v6e", topology="2x1", cells=cells, state_program=None)
    write_manifest(folder, structs.replace(manifest, targets={"tpu-v6e-2x1-tp2": target}))


def test_a_cell_of_an_accelerator_whose_stablehlo_computes_something_else_is_caught(tmp_path, monkeypatch):
    monkeypatch.setenv("LING3_CACHE", str(tmp_path / "cache"))
    folder = Path(shutil.copytree(toy_artifact.shared(), tmp_path / "x.ling3"))
    for_tpu(folder, monkeypatch)
    done = CliRunner().invoke(cli.main, ["verify", str(folder), "--portable", "--json"])
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)["targets"]["tpu-v6e-2x1-tp2"]
    assert {name for name, row in found["cells"].items() if row["status"] == "failed"} == {"decode@2"}
    assert found["cells"].keys() == toy_artifact.CELLS.keys()
    assert found["cells"]["decode@2"]["relative"] == pytest.approx(1e-3, rel=0.02)
    assert found["compiler"].startswith("jaxlib ") and found["lacking"] == {}


@pytest.mark.parametrize(("activations", "hint"), [("bf16", "report this"), ("int8", "`--kernels off` does not")])
def test_a_build_whose_portable_programs_are_wrong_is_refused(artifact, monkeypatch, activations, hint):
    failed = schema.PortableReceipts(schema.Tolerance("median", 0.15), {"decode@8": FAILED}, {}, "jaxlib 0", {})
    monkeypatch.setattr(build, "measure_apart", lambda *arguments, portable: failed)
    manifest = read_manifest(artifact("micro-tp1"))
    target = manifest.targets["cpu-tp1"]
    target = structs.replace(target, geometry={**target.geometry, "activations": activations})
    with pytest.raises(ArtifactError) as caught:
        build.receipts(
            Path("x.ling3"), structs.replace(manifest, targets={"cpu-tp1": target}), "cpu-tp1", portable=True
        )
    assert caught.value.hint.endswith(hint)
    assert caught.value.message.startswith("receipts of `cpu-tp1`, stablehlo, on cpu: expected a median relative error")
    assert caught.value.message.endswith("in decode@8")


def test_no_run_and_portable_contradict_each_other(tmp_path):
    assert "--no-run, --portable and --time exclude each other" in refusal(
        cli.main, "verify", tmp_path, "--portable", "--no-run", code=2
    )


def test_custom_calls_that_the_processor_lacks_are_named():
    @jax.jit
    def special(x):
        call = jax.ffi.ffi_call("only_there", jax.ShapeDtypeStruct(x.shape, x.dtype))
        return jax.lax.top_k(jnp.sort(call(x)), 2)

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    checks = [export.DisabledSafetyCheck.custom_call("only_there")]
    exported = export.export(special, platforms=("tpu",), disabled_checks=checks)(shape)
    assert lacking(exported.mlir_module_serialized) == ("only_there",)
    plain = jax.jit(lambda x: jax.lax.top_k(jnp.sort(x), 2))
    assert lacking(export.export(plain, platforms=("cuda",))(shape).mlir_module_serialized) == ()


@pytest.mark.parametrize(
    ("where", "left"),
    [
        ("sample@8", {"sample@8"}),
        ("decode@8", {"decode@8", "sample@8", "logits_processor@8"}),
        ("prefill@128", {"prefill@128", "decode@8", "sample@8", "logits_processor@8"}),
    ],
)
def test_a_cell_that_needs_one_that_cannot_run_is_left_out_with_it(artifact, where, left):
    (target,) = read_manifest(artifact("micro-tp1")).targets.values()
    calls = {name: ("only_there",) if name == where else () for name in target.cells}
    assert not_run(target, calls) == dict.fromkeys([name for name in target.cells if name in left], ("only_there",))


def test_skipped_cells_are_listed_below_the_table_with_the_operation(artifact):
    receipts = schema.PortableReceipts(
        schema.Tolerance("median", 0.15), {"decode@8": PASSED}, {}, "jaxlib 0.11.2", {"sample@8": ("only_there",)}
    )
    assert told(receipts)[1:] == [
        "stablehlo, on cpu (jaxlib 0.11.2), virtual devices: no executable of the target ran",
        "sample@8: not run: only an accelerator has only_there",
    ]


def test_large_models_and_pools_are_run_only_where_that_is_asked_for(artifact):
    manifest = read_manifest(artifact("micro-tp1"))
    assert too_large(manifest, "cpu-tp1") is None
    heavy = structs.replace(manifest, weights=schema.WeightsRecord({"weights/dense.safetensors": 10**9 + 1}, {}))
    assert too_large(heavy, "cpu-tp1") == "1.0 GB of weights, more than 1 GB"
    state = manifest.targets["cpu-tp1"].state
    large = schema.StateArrayRecord("last_token", (2**32,), "int32", (), ("slots",))
    target = structs.replace(
        manifest.targets["cpu-tp1"], state=schema.State(**structs.asdict(state) | {"arrays": (large,)})
    )
    assert too_large(structs.replace(manifest, targets={"cpu-tp1": target}), "cpu-tp1") == (
        "17.2 GB of state on all devices, more than --state-memory"
    )


def test_portable_receipts_of_unknown_cells_are_refused(artifact, tmp_path):
    folder = Path(shutil.copytree(artifact("micro-tp1"), tmp_path / "x.ling3"))
    manifest = read_manifest(folder)
    proof = schema.PortableReceipts(schema.Tolerance("median", 0.15), {}, {}, "jaxlib 0", {"decode@9": ("only_there",)})
    wrong = structs.replace(manifest.vectors, portable={"cpu-tp1": proof})
    with pytest.raises(ArtifactError, match='expected receipts of cells that there are, found "decode@9"'):
        write_manifest(folder, structs.replace(manifest, vectors=wrong))

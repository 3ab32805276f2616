"""``build --replay CELL``: a cell of an artifact again, compared with what is recorded."""

import re
import shutil

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from ling3export.cli import main as cli
from ling3export.compile import pool as compiling
from tests.support.builds import copying
from tests.support.manifests import changed_targets
from tests.support.refusals import refusal


@pytest.fixture
def compiled(artifact, monkeypatch):
    """The programs of micro-tp2 without compiling."""
    target = artifact.manifest("micro-tp2").targets["cpu-tp2"]
    monkeypatch.setattr(compiling.Compilers, "run", copying(artifact("micro-tp2") / "programs" / "cpu-tp2", target))


def run(*arguments):
    done = CliRunner().invoke(cli.main, ["build", *map(str, arguments)])
    return done.exit_code, done.stdout


def test_a_cell_is_built_again_and_is_what_was_recorded(artifact):
    """Really compiled: from the manifest's configuration, without the checkpoint."""
    code, text = run(artifact("micro-tp2"), "--replay", "cpu@2/sample@8")
    assert code == 0, text
    assert re.fullmatch(
        r"cpu-tp2 sample@8: built in [0-9.]+ s \(lowered in [0-9.]+, compiled in [0-9.]+\)\n"
        r"  stablehlo    the recorded [0-9,]+ bytes\n"
        r"  executable   .*\n"
        r"  temporaries  .*, recorded .*\n",
        text,
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda target: replace(target, toolchain=target.toolchain | {"jax": "0.10.0"}),
            r"it was built with jax 0.10.0, here [0-9.]+",
        ),
        (
            lambda target: replace(target, fingerprint="0" * 64),
            "it was built with other sources of the model or of the lowering, or other flags",
        ),
        (lambda target: target, "neither sources nor toolchain changed since: report this"),
    ],
)
def test_another_portable_program_is_said_with_the_reason(artifact, compiled, unoptimized, tmp_path, change, why):
    copied = shutil.copytree(artifact("micro-tp2"), tmp_path / "x.ling3")

    def other(target):
        cell = target.cells["sample@8"]
        cell = replace(cell, stablehlo=replace(cell.stablehlo, sha256="0" * 64))
        return change(replace(target, cells=target.cells | {"sample@8": cell}))

    changed_targets(copied, other)
    code, text = run(copied, "--replay", "sample@8")
    assert code == 1
    lines = text.splitlines()
    assert re.fullmatch(r"  stablehlo    other bytes than recorded: [0-9,]+, recorded [0-9,]+", lines[1])
    assert re.fullmatch(f" {{15}}{why}", lines[2])


def test_an_executable_of_other_bytes_is_said_to_be_harmless(artifact, compiled, tmp_path):
    """Round 4, line 33: it said that the bytes differ, and not whether that matters."""
    copied = shutil.copytree(artifact("micro-tp2"), tmp_path / "x.ling3")

    def other(target):
        cell = target.cells["sample@8"]
        return replace(target, cells=target.cells | {"sample@8": replace(cell, exec=target.cells["decode@8"].exec)})

    changed_targets(copied, other)
    code, text = run(copied, "--replay", "sample@8")
    assert code == 0 and re.search(r"executable   other bytes than recorded: .*; harmless, for the portable", text)


def test_what_cannot_be_replayed_is_refused(artifact, tmp_path):
    whole = artifact("micro-tp2")
    assert refusal(cli.main, "build", whole, "--replay", "decode@9").endswith(
        "error: --replay: expected a cell of cpu-tp2: prefill@128, decode@8, sample@8, logits_processor@8; "
        "found `decode@9`\n"
    )
    assert "error: target `cpu@4`: the artifact has only cpu-tp2" in refusal(
        cli.main, "build", whole, "--replay", "cpu@4/decode@8"
    )
    assert "there is no such file\nhint: a checkpoint is a folder with config.json" in refusal(
        cli.main, "build", tmp_path, tmp_path / "no.ling3", "--replay", "decode@8"
    )
    said = refusal(cli.main, "build", "--into", "x.ling3", "--replay", "decode@8", code=2)
    assert said.endswith("Error: --into: expected no --replay with it, found one.\n")

"""``build --into``: its errors, the files that it adds, and that the artifact is complete at every moment.

Instead of compiling, the tests copy the programs of an equal artifact; everything else is the product.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ling3export.artifacts.manifest import read_manifest
from ling3export.cli import main as cli
from ling3export.compile import build, into
from ling3export.compile import pool as compiling
from ling3export.foundation.errors import PlanError
from ling3export.runners.cli import main as runner_cli
from ling3export.verify.verify import check_digests
from tests.support.builds import copying, environment
from tests.support.refusals import refusal, said

CELLS = ("prefill@128", "decode@8", "sample@8", "logits_processor@8")


@pytest.fixture
def whole(artifact, tmp_path) -> Path:
    """An artifact for cpu@1 that a test may change."""
    return shutil.copytree(artifact("micro-tp1"), tmp_path / "x.ling3")


@pytest.fixture
def compiled(artifact, monkeypatch) -> None:
    """Programs for cpu@2, without compiling."""
    target = artifact.manifest("micro-tp2").targets["cpu-tp2"]
    monkeypatch.setattr(compiling.Compilers, "run", copying(artifact("micro-tp2") / "programs" / "cpu-tp2", target))


def add(artifact: Path, *options: object) -> str:
    done = CliRunner().invoke(cli.main, ["build", "--into", str(artifact), *map(str, options)])
    assert (done.exit_code, done.stdout) == (0, ""), done.stderr
    return done.stderr


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_target_is_added_without_the_checkpoint_and_generates(whole, compiled):
    before = read_manifest(whole)
    added = add(whole, "--target", "cpu@2")
    assert "cpu-tp2: latent pool: 128 pages of 64 tokens (replicated)" in added
    assert f"added cpu-tp2 to {whole} in " in added
    assert "cpu-tp1 prefill" not in added
    manifest = read_manifest(whole)
    assert list(manifest.targets) == ["cpu-tp1", "cpu-tp2"]
    assert manifest.targets["cpu-tp1"] == before.targets["cpu-tp1"]
    assert manifest.weights == before.weights
    assert sorted(manifest.targets["cpu-tp2"].cells) == sorted(CELLS)
    assert manifest.vectors.receipts["cpu-tp2"].passed
    assert manifest.vectors.receipts["cpu-tp1"] == before.vectors.receipts["cpu-tp1"]
    more = 3 * len(CELLS) + 1  # one more is the program that makes the state
    assert check_digests(whole, manifest)[0] == check_digests(whole, before)[0] + more
    assert names(whole.parent) == ["x.ling3"]
    words = ("generate", whole, "--prompt-ids", "5,6,7", "--max-tokens", "3", "--json", "--target")
    one, other = (json.loads(said(runner_cli.main, *words, target)) for target in ("cpu@1", "cpu@2"))
    assert one["token_ids"] == other["token_ids"]


def test_an_existing_target_is_replaced_only_with_force(whole, compiled):
    add(whole, "--target", "cpu@2")
    before = read_manifest(whole)
    assert refusal(cli.main, "build", "--into", whole, "--target", "cpu@2") == (
        "error: --target: expected targets that `x.ling3` does not have, found cpu-tp2 in it\n"
        "hint: replace them with --force\n"
    )
    assert read_manifest(whole) == before
    add(whole, "--target", "cpu@2", "--force")
    after = read_manifest(whole)
    assert names(whole / "programs") == ["cpu-tp1", "cpu-tp2.2"]
    assert after.targets["cpu-tp2"].cells["decode@8"].exec.path == "programs/cpu-tp2.2/decode@8.exec"
    assert after.targets["cpu-tp2"].state_program.path == "programs/cpu-tp2.2/state.exec"
    check_digests(whole, after)
    add(whole, "--target", "cpu@2", "--force")
    assert names(whole / "programs") == ["cpu-tp1", "cpu-tp2"]


@pytest.mark.parametrize(("folder", "file"), [(".", "manifest.json"), ("programs", "programs")])
def test_an_artifact_that_cannot_be_written_is_refused_before_any_work(whole, monkeypatch, folder, file):
    """Regression: the error came after everything had been compiled."""
    before, make = sorted(whole.parent.rglob("*")), os.open

    def refuse(path, flags, *more, **named):
        unnamed = flags & os.O_TMPFILE == os.O_TMPFILE and Path(path) == whole / folder
        if unnamed or (flags & os.O_CREAT and Path(path).parent == whole / folder):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return make(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(into, "make_plans", lambda *_: pytest.fail("planned"))
    assert refusal(cli.main, "build", "--into", whole, "--target", "cpu@2") == (
        f"error: write `{file}`: expected a writable file, found Permission denied, in {whole}\n"
    )
    assert sorted(whole.parent.rglob("*")) == before


@pytest.mark.parametrize("pattern", ["weights/*", "programs/*/decode@8.exec", "vectors/*", "tokenizer/*"])
def test_a_damaged_artifact_gets_no_target(whole, monkeypatch, pattern):
    """Regression: a new manifest recorded weights that had not been checked."""
    file, before = next(whole.glob(pattern)), read_manifest(whole)
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    monkeypatch.setattr(into, "compiling", lambda *_: pytest.fail("compiled"))
    said = refusal(cli.main, "build", "--into", whole, "--target", "cpu@2")
    assert file.name in said or "tensor" in said
    assert ": expected sha256 " in said
    assert read_manifest(whole) == before
    assert names(whole / "programs") == ["cpu-tp1"]


KILLED = """
import os, sys
from pathlib import Path
from tests.support.builds import copying
from ling3export.cli import main as cli
from ling3export.compile import pool as compiling
from ling3export.compile import build, into
from ling3export.artifacts.manifest import read_manifest
compiling.Compilers.run = copying(Path({programs!r}), read_manifest({other!r}).targets["cpu-tp2"])
at, die = {at!r}, lambda *a, **k: os._exit(9)
if at == "moved":
    build.receipts = die
elif at == "receipts":
    build.write_manifest = die
elif at == "manifest":
    first = into._remove_unnamed  # before the work; the next call comes behind the manifest
    into._remove_unnamed = lambda *a: setattr(into, "_remove_unnamed", die) or first(*a)
sys.argv[1:] = ["build", "--into", {whole!r}, "--target", "cpu@2", *{more!r}]
cli.main()
"""


@pytest.mark.parametrize(
    "at", [*(pytest.param(at, marks=pytest.mark.extras) for at in ("moved", "receipts")), "manifest"]
)
def test_killed_at_any_moment_the_artifact_is_whole_and_the_next_addition_cleans_up(at, whole, artifact, compiled):
    """With --force, files of two targets have the same names; the kill is at the moment when both exist."""
    other = artifact("micro-tp2")
    if at != "moved":
        add(whole, "--target", "cpu@2")
    before = read_manifest(whole)
    script = KILLED.format(
        programs=str(other / "programs" / "cpu-tp2"),
        other=str(other),
        at=at,
        whole=str(whole),
        more=[] if at == "moved" else ["--force"],
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment({}))
    assert done.returncode == 9, done.stderr
    found = read_manifest(whole)
    assert (found == before) is (at != "manifest")
    check_digests(whole, found)
    assert len(names(whole / "programs")) == len(found.targets) + 1  # one extra folder, which no reader uses
    arguments = ["generate", str(whole), "--target", "cpu@1", "--prompt-ids", "5,6", "--max-tokens", "1"]
    assert CliRunner().invoke(runner_cli.main, arguments).exit_code == 0
    add(whole, "--target", "cpu@2", "--force")
    assert len(names(whole / "programs")) == 2
    assert names(whole.parent) == ["x.ling3"]
    check_digests(whole, read_manifest(whole))


def test_receipts_that_fail_leave_the_artifact_as_it_was(whole, compiled, monkeypatch):
    def fail(*_, **__):
        assert (whole / "programs" / "cpu-tp2").is_dir()
        raise PlanError("no")

    before = read_manifest(whole)
    monkeypatch.setattr(build, "receipts", fail)
    assert refusal(cli.main, "build", "--into", whole, "--target", "cpu@2").endswith("error: no\n")
    assert read_manifest(whole) == before
    assert names(whole / "programs") == ["cpu-tp1"]
    assert names(whole.parent) == ["x.ling3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--target", "cpu@2", "--paddings", "16,32"),
            "--paddings: expected 128, which the targets of `x.ling3` share, found 16,32\n"
            "hint: leave it out, or build another artifact\n",
        ),
        (
            ("--target", "cpu@2", "--dtype", "bfloat16"),
            "--dtype: expected float32, which the targets of `x.ling3` share, found bfloat16\n"
            "hint: leave it out, or build another artifact\n",
        ),
        (
            ("--target", "cpu@3"),
            "TP of target `cpu@3`: expected a divisor of 4 (the common divisor of heads 4, experts 16, vocabulary 320 "
            "and widths), found 3\nhint: this model splits over 1, 2, 4\n",
        ),
        (("--target", "cpu@2", "--pages", "0"), "--pages: expected a positive number, found 0\n"),
    ],
)
def test_options_that_contradict_the_artifact_are_refused(whole, options, message):
    before = read_manifest(whole)
    assert refusal(cli.main, "build", "--into", whole, *options) == f"error: {message}"
    assert read_manifest(whole) == before
    assert names(whole / "programs") == ["cpu-tp1"]


def test_there_must_be_an_artifact(tmp_path):
    said = refusal(cli.main, "build", "--into", tmp_path / "x.ling3")
    assert said.startswith("error: artifact `x.ling3`: expected a folder, found nothing, at ")
    said = refusal(cli.main, "build", "a", "b", "--into", tmp_path / "x.ling3", code=2)
    assert said.endswith("Error: --into: expected no ARTIFACT with it, found one.\n")


LINKED = {
    "programs": "programs/cpu-tp1/decode@8.stablehlo",
    "programs/cpu-tp1": "programs/cpu-tp1/decode@8.stablehlo",
    "programs/cpu-tp1/prefill@128.exec": "programs/cpu-tp1/prefill@128.exec",
    "weights": "weights/dense.safetensors",
    "vectors/expected.safetensors": "vectors/expected.safetensors",
}


@pytest.mark.parametrize("part", LINKED)
def test_an_artifact_with_a_link_on_the_way_to_its_files_is_refused(whole, tmp_path, part):
    """Regression: ``programs`` was a link, and other folders at its target were removed."""
    outside = tmp_path / "outside" / "part"
    outside.parent.mkdir()
    (whole / part).rename(outside)
    (whole / part).symlink_to(outside)
    for folder in (outside, outside.parent):
        if folder.is_dir():
            (folder / "cpu-tp2").mkdir()
            (folder / "cpu-tp2" / "decode@8.exec").write_text("years")
            (folder / "thesis").mkdir()
    before = sorted(tmp_path.rglob("*"))
    message = (
        f"error: file `{LINKED[part]}`: expected no symbolic link on the way to it, found one at `{part}`, in {whole}\n"
        "hint: put what the link names in its place: an artifact and a cache hold their files themselves\n"
    )
    assert refusal(cli.main, "build", "--into", whole, "--target", "cpu@2", "--force") == message
    assert refusal(cli.main, "verify", whole) == message
    assert sorted(tmp_path.rglob("*")) == before


def test_an_addition_removes_only_what_a_build_makes(whole, compiled, tmp_path):
    """Regression: every folder of ``programs`` that the manifest does not name was removed."""
    programs, outside = whole / "programs", tmp_path / "outside"
    for folder in ("left", "cpu-tp2.2", "cpu-tp4", "cpu-tp8", "tpu-v6e-4x4-tp16"):
        (programs / folder).mkdir()
    for file in ("left/decode@8.exec", "cpu-tp4/decode@8.exec", "cpu-tp4/notes.txt", "cpu-tp2.2/score@16.stablehlo"):
        (programs / file).write_text("years")
    outside.mkdir()
    (outside / "decode@8.exec").write_text("years")
    (programs / "cpu-tp1.7").symlink_to(outside)
    (programs / "cpu-tp2").symlink_to(tmp_path / "nothing")
    (programs / "cpu-tp8" / "decode@8.exec").symlink_to(outside / "decode@8.exec")
    add(whole, "--target", "cpu@2")
    assert names(programs) == ["cpu-tp1", "cpu-tp1.7", "cpu-tp2", "cpu-tp2.2", "cpu-tp4", "left"]
    assert names(programs / "cpu-tp4") == ["decode@8.exec", "notes.txt"]
    assert (outside / "decode@8.exec").read_text() == "years"
    assert (programs / "left" / "decode@8.exec").read_text() == "years"
    check_digests(whole, read_manifest(whole))

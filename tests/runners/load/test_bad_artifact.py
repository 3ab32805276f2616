"""Damaged artifacts and those for other machines are refused with clear errors, before anything is used."""

import hashlib
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ling3export.artifacts.manifest import read_manifest
from ling3export.cli import main as cli
from ling3export.foundation.errors import ArtifactError
from ling3export.machine import pjrt
from ling3export.runners.cli import main as runner_cli
from ling3export.runners.load.loader import load
from ling3export.verify.verify import check_digests
from tests.support.builds import python
from tests.support.manifests import changed_targets
from tests.support.refusals import refusal

FLIPS = 200
USED = ("manifest.json", "*.exec", "weights/*", "tokenizer/*.json")  # files that the runner reads


@pytest.fixture(scope="module")
def whole(artifact) -> Path:
    return artifact("micro-tp2")


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "x.ling3"))


def files(folder: Path, *patterns: str) -> list[Path]:
    found = {path for pattern in patterns or ("*",) for path in folder.rglob(pattern) if path.is_file()}
    return sorted(path for path in found)


def kinds(folder: Path) -> list[Path]:
    """A file of each kind."""
    return [files(folder, pattern)[0] for pattern in (*USED, "*.stablehlo", "vectors/*")]


def check(folder: Path) -> None:
    """The checks of ``verify`` before it runs anything."""
    check_digests(folder, read_manifest(folder))


def flip(path: Path, offset: int, bits: int = 0xFF) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ bits]))


def test_every_flipped_byte_is_detected_before_use(copy):
    """200 random positions over all files, and a random bit at each."""
    rng = random.Random(7)
    everything = files(copy)
    assert {path.suffix for path in everything} == {".jinja", ".json", ".exec", ".stablehlo", ".xz", ".safetensors"}
    places = [(path, rng.randrange(path.stat().st_size)) for path in everything for _ in range(2)]
    weights = [path.stat().st_size for path in everything]
    while len(places) < FLIPS:
        path = rng.choices(everything, weights)[0]
        places.append((path, rng.randrange(path.stat().st_size)))
    for path, offset in places:
        bits = 1 << rng.randrange(8)
        flip(path, offset, bits)
        with pytest.raises(ArtifactError):
            check(copy)
        flip(path, offset, bits)
    check(copy)


def test_the_runner_gives_no_damaged_file_to_anything(copy, monkeypatch):
    """The loader refuses each flip in a file that it reads; only undamaged programs reach the deserializer."""
    good = {hashlib.sha256(path.read_bytes()).hexdigest() for path in files(copy, "*.exec")}
    given, real = [], pjrt.load_executable

    def deserialize(raw: bytes, *others: Any) -> pjrt.Program:
        given.append(hashlib.sha256(raw).hexdigest())
        return real(raw, *others)

    monkeypatch.setattr(pjrt, "load_executable", deserialize)
    load_all(copy)
    assert set(given) == good
    rng = random.Random(8)
    for path in files(copy, *USED):
        offset = rng.randrange(path.stat().st_size)
        flip(path, offset)
        with pytest.raises(ArtifactError, match=r"expected (sha256|JSON|the header|a format version|its sha256)"):
            load_all(copy)
        flip(path, offset)
    assert set(given) == good


def load_all(folder: Path) -> None:
    """Loads what a run loads: tokenizer files first, since the engine reads them after the programs."""
    from ling3export.runners.text.tokenizer import TokenizerFiles

    tokenizer = TokenizerFiles(folder, read_manifest(folder).tokenizer)
    tokenizer.eos_token_ids()
    tokenizer.tokenizer("text")
    load(folder, report=lambda _: None)


@pytest.mark.parametrize("command", ["verify", "generate"])
def test_a_missing_file_of_each_kind(copy, command):
    used = files(copy, *USED)
    for path in kinds(copy):
        if command == "generate" and path not in used:
            continue
        aside = copy.parent / "aside"
        path.rename(aside)
        if command == "verify":
            said = refusal(cli.main, "verify", copy)
        else:
            said = refusal(runner_cli.main, "generate", copy, "--prompt", "a", "--max-tokens", "1")
        aside.rename(path)
        assert path.name in said
        assert re.search("has no manifest|found No such file", said), said
        assert "\nhint: " in said


def test_truncated_and_longer_files(copy):
    for path in kinds(copy):
        data = path.read_bytes()
        for damaged in (b"", data[:-1], data[: len(data) // 2], data + b"\0"):
            path.write_bytes(damaged)
            with pytest.raises(ArtifactError, match="expected"):
                check(copy)
        path.write_bytes(data)


def test_a_future_format(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"format": 3}))
    for command, arguments in (
        (cli.main, ["inspect", copy]),
        (cli.main, ["verify", copy]),
        (runner_cli.main, ["generate", copy, "--prompt-ids", "1", "--max-tokens", "1"]),
    ):
        said = refusal(command, *arguments)
        assert said == (
            f"error: manifest.json: expected format 1, found format 3, in {copy}\n"
            "hint: install a newer ling3export, or build the artifact again with this one\n"
        )


def claiming(folder: Path, **requires: object) -> Path:
    """Changes the requirements of every executable, and makes the digests right again."""
    changed_targets(folder, lambda target: replace(target, requires=replace(target.requires, **requires)))
    return folder


def command_line(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """``ling3-runner`` as a process."""
    return python("-m", "ling3export.runners.cli", *arguments, **variables)


def test_another_jaxlib_is_refused_and_the_process_does_not_abort(copy):
    claiming(copy, jaxlib="0.9.9")
    done = command_line("generate", copy, "--prompt-ids", "1,2", "--max-tokens", "1")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith("error: target `cpu-tp2`: expected compiled programs that fit, found RECOMPILE ")
    assert "(jaxlib: built for 0.9.9, found " in done.stderr
    assert "--programs allow-compile" in done.stderr
    said = refusal(cli.main, "verify", copy)
    assert "jaxlib: built for 0.9.9, found " in said


@pytest.mark.parametrize(
    ("name", "other"), [("decode@8", "prefill@128"), ("sample@8", "logits_processor@8"), ("prefill@128", "decode@8")]
)
def test_an_executable_of_another_cell_is_refused(copy, name, other):
    """Regression: it was loaded and called, which ended the process by a signal in 6 of 7 runs."""

    def exchange(target: Any) -> Any:
        cell = replace(target.cells[name], exec=target.cells[other].exec)
        return replace(target, cells={**target.cells, name: cell})

    changed_targets(copy, exchange)
    done = command_line("generate", copy, "--prompt-ids", "1,2", "--max-tokens", "4")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert f"program `{name}`: expected an executable that loads, found " in done.stderr
    assert " in place of " in done.stderr


UNCOMPARED = """
import sys
from ling3export.machine import pjrt
pjrt._compare = lambda *arguments: None
from ling3export.runners.cli.main import main
main(sys.argv[1:])
"""


def test_a_process_whose_step_failed_ends_with_1(copy):
    """Regression: SIGABRT ended it after the error was printed, in 3 of 3 runs of this exchange."""

    def exchange(target: Any) -> Any:
        cell = replace(target.cells["decode@8"], exec=target.cells["prefill@128"].exec)
        return replace(target, cells={**target.cells, "decode@8": cell})

    changed_targets(copy, exchange)
    done = python("-c", UNCOMPARED, "generate", copy, "--prompt-ids", "1,2", "--max-tokens", "4")
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "error: engine: expected every step to run, found JaxRuntimeError: INVALID_ARGUMENT" in done.stderr


def test_fewer_devices_than_tp(whole):
    """The error is for a process whose jax runs with one device; the command line makes its own devices."""
    script = (
        "import sys, jax\n"
        "assert len(jax.devices()) == 1\n"
        "from ling3export.foundation.errors import Ling3Error\n"
        "from ling3export.runners.engine.engine import Engine\n"
        "try:\n"
        "    Engine(sys.argv[1])\n"
        "except Ling3Error as error:\n"
        "    print(error)\n"
    )
    done = python("-c", script, whole, JAX_NUM_CPU_DEVICES="1")
    assert done.stdout.startswith("CPU devices: expected 2, found 1 in this process, where jax runs already\nhint: "), (
        done
    )
    done = command_line("generate", whole, "--prompt-ids", "1,2", "--max-tokens", "1", JAX_NUM_CPU_DEVICES="1")
    assert done.returncode == 0, done.stderr

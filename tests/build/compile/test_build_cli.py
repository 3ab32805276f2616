"""``ling3export build`` as a process: help, signals, kills, full disks, and independence of its environment."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ling3export.artifacts.manifest import read_manifest
from ling3export.cli import main as cli
from ling3export.cli import options
from ling3export.foundation.errors import ArtifactError
from ling3export.plan import kernels
from ling3export.runners.cli import main as runner_cli
from tests.support.builds import SMALLEST, building, ended, environment, kill_one, marked, wait_for, wait_until_gone
from tests.support.tiny import tiny_fields, tiny_weights, write_tiny
from tests.support.waiting import until

pytestmark = pytest.mark.build


COMPILING = ".x.ling3.partial-*/programs/*/prefill@16.stablehlo"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint without tokenizer files."""
    fields = tiny_fields()
    return write_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny", fields, tiny_weights(fields))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_readers_of_options_are_plain_click_types():
    """Regression: click.ParamType takes no type argument before click 8.3, so the import failed."""
    assert options.Parsed.__bases__ == (click.ParamType,)


def test_the_artifact_is_named_after_the_checkpoint(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.ling3").mkdir()
    done = CliRunner().invoke(cli.main, ["build", str(checkpoint), *SMALLEST])
    assert done.exit_code == 1
    assert "error: output `tiny.ling3`: expected a free name, found one that exists" in done.stderr


def test_without_a_checkpoint_the_demo_is_built_into_demo_ling3(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo.ling3").mkdir()
    done = CliRunner().invoke(cli.main, ["build", "--paddings", "16,128,512"])
    assert done.exit_code == 1
    assert "cpu-tp16: decode paddings 1,16,64: from one sequence alone to all 64 running" in done.stderr
    assert "error: output `demo.ling3`: expected a free name, found one that exists" in done.stderr


def test_an_installation_without_the_build_side_says_what_is_missing(checkpoint, tmp_path, monkeypatch):
    """Regression: the build ran for a while, then printed each cell's ModuleNotFoundError."""
    monkeypatch.setattr("ling3export.foundation.extras.find_spec", lambda name: None if name == "flax" else object())
    done = CliRunner().invoke(cli.main, ["build", str(checkpoint), str(tmp_path / "x.ling3")])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: build: expected the packages of the extra `build`, found no flax\nhint: in ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_build_and_its_children_and_leaves_nothing(checkpoint, tmp_path, number, code, unoptimized):
    """Regression: SIGTERM left the temporary folder, and workers that went on compiling."""
    artifact = tmp_path / "x.ling3"
    with building(checkpoint, artifact, options=["--jobs", "2"]) as process:
        wait_for(tmp_path, COMPILING, process)
        process.send_signal(number)
        found, err = ended(process)
    assert found == code
    assert "Traceback" not in err
    wait_until_gone(artifact)
    assert names(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_compiler_of_the_kernels_at_once(checkpoint, tmp_path, number):
    """Regression: Ctrl-C waited 101 s for c++, and SIGKILL left it running."""
    tools, artifact = tmp_path / "tools", tmp_path / "x.ling3"
    tools.mkdir()
    script = f'#!/bin/sh\n[ "$1" = --version ] && exit\ntouch {tmp_path}/begun\nsleep 600\n'
    for name in kernels.COMPILERS:
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    options = ["--dtype", "bfloat16", "--kernels", "on"]
    variables = {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    with building(checkpoint, artifact, options=options, variables=variables) as process:
        wait_for(tmp_path, "begun", process)
        until(lambda: marked(artifact, "600"))
        process.send_signal(number)
        begun = time.monotonic()
        _, err = ended(process)
        wait_until_gone(artifact, 30)
        assert time.monotonic() - begun < 30
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    assert "x.ling3" not in names(tmp_path) and "Traceback" not in err
    assert "cpu-tp1, native kernels: compiling" in err


@pytest.mark.extras
def test_a_kill_at_any_moment_leaves_nothing_whole_and_the_next_build_cleans_up(checkpoint, tmp_path, unoptimized):
    """Also: one of two simultaneous builds wins and the other is refused, and an artifact without a tokenizer refuses
    text.

    Neither the working directory nor the user's settings of jax reach the processes that compile; both once broke a
    build.
    """
    artifact, elsewhere = tmp_path / "x.ling3", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "json.py").write_text("raise SystemExit('shadowed')")
    moments = [".x.ling3.lock", ".x.ling3.partial-*/weights/*", COMPILING.replace("stablehlo", "exec")]
    for moment in moments:
        with building(checkpoint, artifact) as process:
            wait_for(tmp_path, moment, process)
            process.kill()
        with pytest.raises(ArtifactError):
            read_manifest(artifact)
        wait_until_gone(artifact)
        assert not artifact.exists()
        assert not list(tmp_path.glob("**/manifest.json"))

    surroundings = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cuda", "JAX_NUM_CPU_DEVICES": "3"}
    left = list(tmp_path.glob(".x.ling3.partial-*"))
    assert len(left) == 1
    with building(checkpoint, artifact, cwd=elsewhere, variables=surroundings) as winner:
        while left[0].exists():  # else wait_for would see the killed build's file
            assert winner.poll() is None, winner.communicate()[1]
            time.sleep(0.01)
        wait_for(tmp_path, COMPILING, winner)
        assert len(list(tmp_path.glob(".x.ling3.partial-*"))) == 1
        with building(checkpoint, artifact) as other:
            code, err = ended(other)
        assert code == 1
        assert f"error: artifact `x.ling3`: expected no other build, found process {winner.pid} writing it" in err
        assert "hint: wait until it ends, or choose another folder" in err
        code, err = ended(winner)
    assert code == 0, err
    assert names(tmp_path) == ["elsewhere", "x.ling3"]
    assert read_manifest(artifact).tokenizer == ()
    check_text_is_refused(artifact)


def check_text_is_refused(artifact: Path) -> None:
    """An artifact without a tokenizer reads and writes token ids."""
    command = ["generate", str(artifact), "--max-tokens", "2"]
    done = CliRunner().invoke(runner_cli.main, [*command, "--prompt", "a"])
    assert done.exit_code == 1
    assert "error: prompt: text in: this artifact has no tokenizer" in done.stderr
    assert "hint: give and take token ids" in done.stderr
    done = CliRunner().invoke(runner_cli.main, [*command, "--prompt-ids", "1,2", "--json"])
    assert done.exit_code == 0, done.stderr
    line = json.loads(done.stdout)
    assert line["text"] is None
    assert len(line["token_ids"]) == 2


def test_a_compiler_that_dies_is_named_and_loses_no_other_cell(checkpoint, tmp_path, unoptimized):
    """Also: the same build again compiles only that cell."""
    artifact = tmp_path / "x.ling3"
    cache = ["--cache", "on", "--cache-dir", tmp_path / "cache"]
    with building(checkpoint, artifact, options=cache) as process:
        wait_for(tmp_path, COMPILING, process)
        kill_one(artifact, "ling3export.compile.worker")
        code, err = ended(process)
    assert code == 1
    assert (
        "error: programs: expected 4 cells to build, 1 did not: "
        "prefill@16: the compiling process was killed by SIGKILL: nothing was printed\n"
        "hint: if the memory was full: compile fewer at a time with --jobs; the 3 others are in the cache: the same "
        "build again takes them\n"
    ) in err
    assert "Traceback" not in err
    table = [line.split() for line in err[err.index("cpu-tp1:\n") :].splitlines()[2:6]]
    assert table[0][:2] == ["prefill@16", "failed"]
    assert [row[:2] for row in table[1:]] == [
        [f"{phase}@1", "compiled"] for phase in ("decode", "sample", "logits_processor")
    ]
    assert marked(artifact) == []
    assert names(tmp_path) == ["cache"]

    with building(checkpoint, artifact, options=cache) as process:
        code, err = ended(process)
    assert code == 0, err
    assert "cells: 1 compiled, 3 from the cache (on, " in err
    assert names(tmp_path) == ["cache", "x.ling3"]
    assert read_manifest(artifact).vectors.receipts["cpu-tp1"].passed


@pytest.mark.parametrize(
    ("limit", "file"), [(1_000, r"write `\w+.safetensors`"), (700_000, r": write `(prefill@16|decode@1).exec`")]
)
def test_a_disk_that_is_full_is_named_and_nothing_is_left(checkpoint, tmp_path, limit, file, unoptimized):
    with building(checkpoint, tmp_path / "x.ling3", limit=limit) as process:
        code, err = ended(process)
    assert code == 1
    assert re.search(
        f"error: .*{file}: expected room for [0-9,]+ bytes, found a file-size limit of {limit:,} bytes", err
    )
    assert "hint: raise the limit (ulimit -f) or write to another volume" in err
    assert "Traceback" not in err
    assert names(tmp_path) == []


def test_a_full_disk_behind_stdout_is_named(artifact):
    command = [sys.executable, "-m", "ling3export.cli", "inspect", str(artifact("micro-tp2")), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment({}))
    assert done.returncode == 1
    assert done.stderr == "error: output: expected to be readable or writable, found No space left on device\n"

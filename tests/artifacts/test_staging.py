"""Folders appear complete or not at all, after errors, kills, full disks, and with two builds at once."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ling3export.artifacts import staging
from ling3export.artifacts.manifest import MANIFEST
from ling3export.artifacts.staging import folder_lock, staged
from ling3export.foundation.errors import ArtifactError
from tests.support.limits import file_size_limit


@contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen]:
    """Starts a second python, returns after its first line of output, and kills it at the end."""
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def write(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(json.dumps({"producer": {"ling3export": "0"}, "text": text}))


def written(folder: Path) -> str:
    return json.loads((folder / MANIFEST).read_text())["text"]


def write_and_raise(folder: Path, error: BaseException) -> None:
    write(folder, "new")
    raise error


def test_a_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    with staged(tmp_path / "a.ling3") as partial:
        assert partial.parent == tmp_path
        assert partial.name.startswith(f".a.ling3.partial-{os.getpid()}-")
        write(partial, "new")
        assert not (tmp_path / "a.ling3").exists()
    assert names(tmp_path) == ["a.ling3"]
    assert written(tmp_path / "a.ling3") == "new"


def test_nothing_stays_of_a_block_that_raises(tmp_path: Path) -> None:
    for force in (False, True):
        with pytest.raises(KeyboardInterrupt), staged(tmp_path / "a", force=force) as partial:
            write_and_raise(partial, KeyboardInterrupt())
        assert names(tmp_path) == []


def test_an_existing_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a", "old")
    with pytest.raises(ArtifactError) as caught, staged(tmp_path / "a"):
        pytest.fail("the block must not run")
    assert str(caught.value) == (
        f"output `a`: expected a free name, found one that exists, in {tmp_path}\n"
        "hint: choose another name, or replace it with --force"
    )
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("swaps", [True, False], ids=["names swapped", "two renames"])
def test_force_replaces_the_whole_folder_and_only_on_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    if not swaps:  # like a file system that cannot swap folders
        monkeypatch.setattr(staging, "swap_names", lambda one, other: False)
    (tmp_path / "a").mkdir()
    write(tmp_path / "a", "old")
    (tmp_path / "a" / "extra").write_text("old")
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "a", force=True) as partial:
        write_and_raise(partial, ZeroDivisionError())
    assert names(tmp_path / "a") == ["extra", MANIFEST]
    with staged(tmp_path / "a", force=True) as partial:
        write(partial, "new")
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == [MANIFEST]
    assert written(tmp_path / "a") == "new"


def test_force_replaces_nothing_that_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("text")
    for name, content in (("web", '{"name": "app"}'), ("list", "[]"), ("cut", '{"producer": ')):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text(content)
    before = names(tmp_path)
    for name in before:
        with pytest.raises(ArtifactError) as caught, staged(tmp_path / name, force=True):
            pytest.fail("the block must not run")
        assert str(caught.value) == (
            f"output `{name}`: expected a folder whose manifest.json ling3export wrote, found something else, "
            f"in {tmp_path}\n"
            "hint: --force replaces only what an earlier run wrote: remove it yourself, or choose another name"
        )
    assert names(tmp_path) == before


def test_a_rename_that_fails_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    write(tmp_path / "a", "old")
    rename = staging.rename
    monkeypatch.setattr(staging, "swap_names", lambda one, other: False)

    def fails_for_the_new(old: Path, new: Path) -> None:
        if old.is_dir() and written(old) == "new":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(old, new)

    monkeypatch.setattr(staging, "rename", fails_for_the_new)
    with pytest.raises(OSError, match="Input/output error"), staged(tmp_path / "a", force=True) as partial:
        write(partial, "new")
    assert names(tmp_path) == ["a"]
    assert written(tmp_path / "a") == "old"


def test_the_parent_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught, staged(tmp_path / "no" / "a"):
        pytest.fail("the block must not run")
    assert str(caught.value) == f"output `a`: its parent folder does not exist: {tmp_path / 'no'}"


def test_a_full_disk_in_the_block_is_an_artifact_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught, staged(tmp_path / "a") as partial:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(partial / "decode@16.exec"))
    assert caught.value.message.startswith("write `decode@16.exec`: expected room, found a full disk (")
    with pytest.raises(FileNotFoundError), staged(tmp_path / "a"):
        (tmp_path / "a missing input").read_bytes()
    assert names(tmp_path) == []


def test_a_file_size_limit_in_the_block_leaves_nothing(tmp_path: Path) -> None:
    with file_size_limit(65536), pytest.raises(ArtifactError) as caught, staged(tmp_path / "a") as partial:
        (partial / "x.exec").write_bytes(bytes(100_000))
    assert caught.value.message.startswith("write `a`: expected room, found a file-size limit of 65,536 bytes, in ")
    assert names(tmp_path) == []


BUILD = """
    import sys
    from pathlib import Path
    import numpy as np
    from ling3export.artifacts.staging import staged
    from ling3export.artifacts.parameters import Tensor
    from ling3export.artifacts.store import StoreWriter
    with staged(Path(sys.argv[1]), force=True) as partial:
        writer = StoreWriter(partial, {"weights/x.safetensors": {"x": Tensor((2, 64), "float32", 2)}})
        writer.write("x", np.zeros(64, np.float32), shard=0)
        print("half", flush=True)
        sys.stdin.readline()
        writer.write("x", np.zeros(64, np.float32), shard=1)
        writer.finish()
        (partial / "manifest.json").write_text('{"text": "new"}')
"""


@pytest.mark.parametrize("old", [False, True])
def test_a_kill_leaves_no_folder_that_looks_whole(tmp_path: Path, old: bool) -> None:
    target = tmp_path / "a"
    if old:
        target.mkdir()
        write(target, "old")
    with process(BUILD, target) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "half\n"
        started.send_signal(signal.SIGKILL)
        started.wait()
    left = [name for name in names(tmp_path) if name.startswith(".a.partial-")]
    assert len(left) == 1
    assert names(tmp_path) == sorted([".a.lock", *left] + ["a"] * old)
    assert names(tmp_path / left[0]) == ["weights"]
    assert (tmp_path / left[0] / "weights" / "x.safetensors").read_bytes()[:8] == bytes(8)  # data without a header
    if old:
        assert written(target) == "old"
    foreign = tmp_path / ".a.partial-notes"
    foreign.mkdir()
    with staged(target, force=old) as partial:
        assert not (tmp_path / left[0]).exists()
        write(partial, "new")
    assert names(tmp_path) == [foreign.name, "a"]
    assert written(target) == "new"


def test_two_builds_into_one_folder(tmp_path: Path) -> None:
    with process(BUILD, tmp_path / "a") as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "half\n"
        for spelling in (tmp_path / "a", tmp_path / "." / "b" / ".." / "a"):
            with pytest.raises(ArtifactError) as caught, staged(spelling, force=True):
                pytest.fail("the block must not run")
            assert str(caught.value) == (
                f"artifact `a`: expected no other build, found process {started.pid} writing it, in {tmp_path}\n"
                "hint: wait until it ends, or choose another folder"
            )
        with folder_lock(tmp_path / "b"):
            pass
        started.communicate("go on\n")
        assert started.returncode == 0
    assert names(tmp_path) == ["a"]
    assert written(tmp_path / "a") == "new"


def test_a_lock_holds_within_one_process_and_is_freed_by_an_error(tmp_path: Path) -> None:
    refused = f"found process {os.getpid()} writing it"
    with pytest.raises(ArtifactError, match=refused), folder_lock(tmp_path / "a"), folder_lock(tmp_path / "a"):
        pytest.fail("the block must not run")
    assert names(tmp_path) == []
    with folder_lock(tmp_path / "a"):
        assert names(tmp_path) == [".a.lock"]


def test_a_lock_file_removed_between_open_and_lock_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: two builds held the lock at once, one on a file that the earlier holder had just removed."""
    flock = fcntl.flock
    removed: list[bool] = []

    def slow(descriptor: int, operation: int) -> None:
        if not removed:
            (tmp_path / ".a.lock").unlink()
            removed.append(True)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    with folder_lock(tmp_path / "a"):
        assert names(tmp_path) == [".a.lock"]
        with pytest.raises(ArtifactError), folder_lock(tmp_path / "a"):
            pytest.fail("the block must not run")


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    """Regression: if the lock's name was a link, its target was overwritten with a process id."""
    outside = tmp_path / "outside"
    outside.write_text("years")
    start = "write `.a.lock`: expected a "
    expected = {
        Path.symlink_to: f"{start}writable file, found a symbolic link, in {tmp_path}",
        Path.hardlink_to: f"{start}regular file with one name, found one with 2 names, in {tmp_path}\n"
        "hint: this program makes no such file: look at who did, and remove it",
    }
    for link, message in expected.items():
        link(tmp_path / ".a.lock", outside)
        with pytest.raises(ArtifactError) as caught, folder_lock(tmp_path / "a"):
            pytest.fail("the block must not run")
        assert str(caught.value) == message
        assert outside.read_text() == "years"
        assert names(tmp_path) == [".a.lock", "outside"]
        (tmp_path / ".a.lock").unlink()
    os.mkfifo(tmp_path / ".a.lock")
    with pytest.raises(ArtifactError) as caught, folder_lock(tmp_path / "a"):
        pytest.fail("the block must not run")
    assert caught.value.message == f"{start}regular file with one name, found something else, in {tmp_path}"

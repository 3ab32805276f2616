"""``ling3export cache status | cleanup``: removal by age, by size, and of all entries."""

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ling3export.artifacts.records import sha256_of
from ling3export.cache.cells import Cells
from ling3export.cache.cleanup import Cleaned, clean_up, status
from ling3export.cache.store import Cache, CacheUse
from ling3export.cli import main as cli
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.plan import make_plan
from tests.support.tiny import tiny_fields

TARGET = {"platform": "cpu", "kind": None, "topology": None, "tp": 2, "processes": 1, "machine": "m"}


def fields(padding: int) -> dict[str, object]:
    return {"cell": {"phase": "decode", "padding": padding}, "target": TARGET}


def program(padding: int) -> dict[str, object]:
    return {"modules": {"portable": str(padding)}, "target": TARGET}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three cells with their programs, of 1,000, 2,000 and 3,000 bytes, used 3, 2 and 1 days ago."""
    cache = Cache(CacheUse("on", tmp_path / "cache"), pytest.fail)
    for number in (1, 2, 3):
        add(cache, number)
    for path in cache.folder.rglob("*"):
        os.utime(path, (0, 0))
    for number in (1, 2, 3):
        set_age(cache, number, 4 - number)
    return cache.folder


def add(cache: Cache, number: int) -> None:
    raw = bytes([number]) * (1000 * number)
    cache.write("programs", program(number), {}, raw)
    cache.write("cells", fields(number), {}, b"text")


def set_age(cache: Cache, number: int, days: float) -> None:
    when = time.time() - days * 86400
    for kind, key in (("cells", fields(number)), ("programs", program(number))):
        os.utime(cache.path(kind, sha256_of(key)), (when, when))


def left(folder: Path) -> list[int]:
    """The cells that are complete with their programs; a cell without its program, or the reverse, is a miss."""
    cache = Cache(CacheUse("readonly", folder), pytest.fail)
    cells = [n for n in (1, 2, 3) if cache.read("cells", sha256_of(fields(n)))]
    return [n for n in cells if cache.read("programs", sha256_of(program(n)))]


def test_size_removes_the_least_recently_used_and_no_more(folder):
    whole = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert status(folder).bytes == whole
    set_age(Cache(CacheUse("on", folder), pytest.fail), 1, 0)
    assert clean_up(folder, max_bytes=whole).removed == 0
    done = clean_up(folder, max_bytes=whole - 2000)
    assert left(folder) == [1, 3]
    assert status(folder).bytes == done.bytes <= whole - 2000
    assert done.removed + done.kept == 6


def test_all_leaves_nothing_and_a_missing_folder_is_empty(folder, tmp_path):
    assert clean_up(folder).kept == 0
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert clean_up(tmp_path / "none") == Cleaned()
    assert not (tmp_path / "none").exists()


def cache_command(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, ["cache", *arguments])


def test_the_commands_print_data_on_stdout(folder, tmp_path):
    where = ["--cache-dir", str(folder)]
    shown = cache_command("status", *where).stdout.splitlines()
    assert shown[0] == f"folder    {folder}"
    assert shown[1] == "entries   3 cells, 3 programs"
    found = json.loads(cache_command("status", "--json", *where).stdout)
    assert (found["cells"], found["programs"]) == (3, 3)
    done = cache_command("cleanup", "--max-size", "6000", *where)
    assert done.stdout == "removed 2 entries (0.0 MB); 4 entries (0.0 MB) are left\n"
    done = cache_command("cleanup", "--all", *where)
    assert done.stdout == "removed 4 entries (0.0 MB); 0 entries (0.0 MB) are left\n"


NO_CACHES = dict.fromkeys(("artifact", "checkpoint", "hub"), "other files") | {"nope": "No such file or directory"}
NO_CACHES["file"] = "Not a directory"


@pytest.mark.parametrize("command", [["status"], ["cleanup", "--all"]])
@pytest.mark.parametrize(("name", "found"), NO_CACHES.items())
def test_a_folder_that_is_no_cache_is_refused_unchanged(tmp_path, monkeypatch, command, name, found):
    """Regression: a cleanup left its lock in a checkpoint, and would have removed files with digests as names."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "checkpoint" / "lock").touch()  # as the cleanup left it
    (tmp_path / "artifact" / "programs").mkdir(parents=True)
    (tmp_path / "artifact" / "manifest.json").write_text("{}")
    (tmp_path / "hub" / "blobs").mkdir(parents=True)
    (tmp_path / "hub" / "blobs" / ("f" * 64)).write_text("weights")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    done = cache_command(*command, "--cache-dir", str(tmp_path / name))
    assert (done.exit_code, done.stdout, done.stderr) == (
        1,
        "",
        f"error: cache `{name}`: expected a folder that builds have written to, found {found}, in {tmp_path}\n"
        "hint: name another with --cache-dir, or with LING3_CACHE\n",
    )
    if name != "nope":  # the default cache may not exist
        monkeypatch.setenv("LING3_CACHE", str(tmp_path / name))
        assert cache_command(*command).stderr == done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_default_folder_that_is_empty_or_absent_holds_no_entries(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        monkeypatch.setenv("LING3_CACHE", str(tmp_path / name))
        assert "entries   0 cells, 0 programs\n" in cache_command("status").stdout
        assert cache_command("cleanup", "--all").stdout.startswith("removed 0 entries (0.0 MB); 0 entries (0.0 MB) ")
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["cleanup"], 2, "Error: expected --max-size or --all.\n"),
        (["cleanup", "--max-size", "x"], 1, "error: --max-size: expected a size, found `x`\n"),
    ],
)
def test_invalid_arguments_of_a_cleanup_are_refused(arguments, code, message):
    done = cache_command(*arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert message in done.stderr


def test_entries_that_no_build_wrote_stop_neither_status_nor_cleanup(folder):
    """Regression: one entry with deeply nested JSON ended status, cleanup and builds with a traceback."""
    whole = status(folder)
    (folder / "cells" / ("a" * 64)).write_bytes(b"[" * 10**6)
    (folder / "cells" / ("b" * 64)).symlink_to("/dev/zero")
    os.mkfifo(folder / "programs" / ("c" * 64))
    found = status(folder)
    assert (found.cells, found.programs) == (whole.cells + 2, whole.programs + 1)
    said: list[str] = []
    cells = Cells(CacheUse("readonly", folder), said.append)
    config = Config.from_dict(tiny_fields())
    plan = make_plan(config, Options(paddings=(16,), tp=2, context=128), "cpu")
    assert cells.fetch(config, plan, plan.cells[0], folder) is None and said == []
    assert clean_up(folder).kept == 0
    assert list(folder.glob("*/*")) == []


def test_a_cleanup_removes_files_of_killed_writers(folder):
    """Regression: ``.partial-PID-…`` of a trial and ``.KEY.exec.PID`` of a runner stayed forever."""
    (folder / "recompiled").mkdir()
    names = [
        ".partial-1-0123abcd",
        ".trial.partial-1-0123abcd",
        "cells/.partial-1-0123abcd",
        "programs/.x.partial-1-0123abcd",
        "recompiled/.x.exec.partial-1-0123abcd",
    ]
    for name in (*names, ".mine-partial", "cells/.y.partial-1-0123abcd", "recompiled/.y.exec.partial-1-0123abcd"):
        (folder / name).write_bytes(b"x")
    for name in names:
        os.utime(folder / name, (0, 0))
    clean_up(folder, max_bytes=10**9)
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob(".*"))
    live = ["cells/.y.partial-1-0123abcd", "recompiled/.y.exec.partial-1-0123abcd"]  # a process may be writing them
    assert there == [".mine-partial", *live]


def test_programs_that_runners_compiled_are_counted_and_removed_the_older_ones_first(tmp_path):
    folder = tmp_path / "cache" / "recompiled"
    folder.mkdir(parents=True)
    for key, when in (("old", 0), ("new", time.time())):
        for suffix in ("json", "exec"):
            (folder / f"{key}.{suffix}").write_bytes(b"x" * 10)
            os.utime(folder / f"{key}.{suffix}", (when, when))
    found = status(folder.parent)
    assert (found.recompiled, found.bytes, found.cells) == (2, 40, 0)
    assert clean_up(folder.parent, 20) == Cleaned(removed=1, kept=1, freed=20, bytes=20)
    assert sorted(path.name for path in folder.iterdir()) == ["new.exec", "new.json"]


def test_a_cache_whose_folders_are_links_is_not_cleaned(folder, tmp_path):
    """Regression: with a link in place of ``cells``, files of the linked folder were removed."""
    outside = tmp_path / "outside"
    (folder / "cells").rename(outside)
    (folder / "cells").symlink_to(outside)
    done = cache_command("cleanup", "--all", "--cache-dir", str(folder))
    assert done.exit_code == 1
    assert "expected no symbolic link on the way to it, found one at `cells`" in done.stderr
    assert len(list(outside.iterdir())) == 3

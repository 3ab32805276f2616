"""Files that tests keep between runs: one build cache for all tests, and no old entries."""

import json
import os
import time
from pathlib import Path

import pytest

from ling3export.artifacts.files import RECOMPILED, user_cache
from ling3export.cache.store import Cache, CacheUse
from tests.support import artifacts_fixture
from tests.support.artifacts_fixture import KEPT_DAYS, kept_folder, kept_programs, remove_old

LONG_AGO = time.time() - (KEPT_DAYS + 1) * 24 * 3600


def test_builds_of_tests_share_one_cache_that_stays():
    assert user_cache() == kept_programs(kept_folder())


def aged(*paths: Path) -> None:
    for path in paths:
        os.utime(path, (LONG_AGO, LONG_AGO))


def keys(folder: Path) -> list[str]:
    paths = (kept_programs(folder) / "programs").iterdir()
    return sorted(json.loads(path.read_bytes().split(b"\n")[1])["fields"]["name"] for path in paths)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two artifacts, two programs of jit and two of builds; the first of each was last used long ago."""
    for name in ("old-0123", "new-4567"):
        (tmp_path / name / "x").mkdir(parents=True)
    (tmp_path / "jit").mkdir()
    for name in ("old", "new"):
        (tmp_path / "jit" / name).write_bytes(b"")
    cache = Cache(CacheUse(folder=kept_programs(tmp_path)), pytest.fail)
    for name in ("old", "new"):
        cache.write("programs", {"name": name}, {}, name.encode() * 200)
    old = [path for path in (kept_programs(tmp_path) / "programs").iterdir() if b'"old"' in path.read_bytes()]
    aged(tmp_path / "old-0123", tmp_path / "jit/old", *old)
    return tmp_path


def test_entries_without_recent_use_are_removed(folder: Path):
    remove_old(folder)
    assert sorted(path.name for path in folder.glob("*-*")) == ["new-4567"]
    assert [path.name for path in (folder / "jit").iterdir()] == ["new"]
    assert keys(folder) == ["new"]


def test_the_least_recently_used_programs_are_removed_first(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(artifacts_fixture, "KEPT_DAYS", 1000)
    remove_old(folder)
    assert keys(folder) == ["new", "old"]
    monkeypatch.setattr(artifacts_fixture, "KEPT_BYTES", 1000)
    remove_old(folder)
    assert keys(folder) == ["new"]


def test_programs_of_runners_stay_until_their_sources_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = kept_programs(tmp_path) / RECOMPILED / "key.exec"
    remove_old(tmp_path)  # the folder does not exist yet
    kept.parent.mkdir()
    kept.write_bytes(b"")
    remove_old(tmp_path)
    assert kept.exists()
    monkeypatch.setattr(artifacts_fixture, "sources_of", lambda module: f"other sources of {module}")
    remove_old(tmp_path)
    assert not kept.exists()

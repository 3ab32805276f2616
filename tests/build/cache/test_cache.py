"""The cache's files: whole or absent under kills and parallel writers; broken ones named, discarded, made again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ling3export.artifacts.files import user_cache
from ling3export.artifacts.records import sha256_of
from ling3export.cache.cleanup import clean_up
from ling3export.cache.store import Cache, entries
from ling3export.cache.use import CacheUse
from ling3export.foundation.errors import ArtifactError
from tests.support.builds import environment

FIELDS = {"cell": {"phase": "decode", "padding": 16}, "toolchain": {"jaxlib": "0.11.2"}}
KEY = sha256_of(FIELDS)
RAW = bytes(range(256)) * 40
# Writes one entry again and again, with other bytes each time: compiling is not reproducible on CPU.
WRITER = """
import os, sys
from pathlib import Path
from ling3export.cache.store import Cache
from ling3export.cache.use import CacheUse
cache = Cache(CacheUse("on", Path(sys.argv[1])), lambda text: print(text, file=sys.stderr))
print("ready", flush=True)
while True:
    raw = os.urandom(3000)
    cache.write("programs", {"n": 1}, {"first": raw[0]}, {"exec": raw, "more": raw[:7]})
"""


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path, said) -> Cache:
    """A cache with one entry."""
    cache = Cache(CacheUse("on", tmp_path / "cache"), said.append)
    cache.write("programs", FIELDS, {"seconds": 1.5}, {"exec": RAW})
    return cache


def blob(cache: Cache) -> Path:
    return next((cache.folder / "blobs").iterdir())


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its content and time."""
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_entry_gives_back_its_record_and_bytes_and_names_its_fields(cache, said):
    entry = cache.read("programs", KEY)
    assert entry is not None
    assert (entry.data, entry.record, entry.fields) == ({"exec": RAW}, {"seconds": 1.5}, FIELDS)
    assert json.loads(cache.path("programs", KEY).read_text())["fields"] == FIELDS
    assert cache.read("cells", KEY) is None
    assert cache.read("programs", sha256_of({})) is None
    assert said == []


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda entry, blob: blob.write_bytes(RAW[:-1] + b"!"), "10,240 bytes of another digest"),
        (lambda entry, blob: blob.write_bytes(RAW[:100]), "100 bytes of another digest"),
        (lambda entry, blob: blob.unlink(), "No such file or directory"),
        (lambda entry, blob: entry.write_text(entry.read_text().replace("1.5", "2.5")), "another digest"),
        (lambda entry, blob: entry.write_bytes(b""), "no entry (JSONDecodeError: "),
        (lambda entry, blob: entry.write_bytes(b"[1]"), "no entry (TypeError: "),
        (lambda entry, blob: entry.write_bytes(b"{\xff}"), "no entry (UnicodeDecodeError: "),
        (lambda entry, blob: entry.write_text(entry.read_text().replace('n": 2', 'n": 9')), "version 9 instead of 2"),
        (lambda entry, blob: entry.write_text("[" * 10**5), "more than 16 levels of objects and lists"),
    ],
)
def test_a_broken_entry_is_named_discarded_and_can_be_made_again(cache, said, damage, found):
    path = cache.path("programs", KEY)
    damage(path, blob(cache))
    assert cache.read("programs", KEY) is None
    message = f"cache entry programs/{KEY[:12]}: expected a whole one, found {found}"
    assert len(said) == 1
    assert said[0].startswith(message)
    assert said[0].endswith(f", in {cache.folder}; discarded, it is made again")
    assert not path.exists()
    cache.write("programs", FIELDS, {"seconds": 3}, {"exec": RAW})
    entry = cache.read("programs", KEY)
    assert entry is not None and (entry.data["exec"], entry.record) == (RAW, {"seconds": 3})
    assert len(said) == 1


def test_an_entry_under_another_name_or_with_a_digest_that_is_none_is_not_followed(cache, said):
    path, other = cache.path("programs", KEY), sha256_of({"n": 2})
    whole = path.read_text()
    path.rename(cache.path("programs", other))
    assert cache.read("programs", other) is None
    raw = json.loads(whole)
    del raw["sha256"]
    raw["blobs"]["exec"] = "../../secret"
    path.write_text(json.dumps(raw | {"sha256": sha256_of(raw)}))
    assert cache.read("programs", KEY) is None
    found = [text.partition("found ")[2].partition(",")[0] for text in said]
    assert found == ["the fields of another key", "bytes that no digest names"]


def test_a_lock_is_not_taken_through_a_link(cache, said, tmp_path):
    """The cache's lock once followed a link, and made the file that it named."""
    lock, outside = cache.folder / "lock", tmp_path / "outside"
    lock.unlink()
    lock.symlink_to(outside)
    message = f"write `lock`: expected a writable file, found a symbolic link, in {cache.folder}"
    assert cache.read("programs", KEY) is None
    cache.write("programs", {"n": 2}, {}, {"exec": b"x"})
    assert said == [f"cache not used: {message}", f"not cached: {message}"]
    assert not outside.exists()
    outside.touch()
    with pytest.raises(ArtifactError, match="write `lock`: expected a writable file, found a symbolic link"):
        clean_up(cache.folder, everything=True)
    lock.unlink()
    lock.hardlink_to(outside)
    assert cache.read("programs", KEY) is None
    assert "expected a regular file with one name, found one with 2 names" in said[-1]
    lock.unlink()
    assert cache.read("programs", KEY) is not None


def test_readonly_uses_what_is_there_and_changes_nothing(cache, said, tmp_path):
    reader = Cache(CacheUse("readonly", cache.folder), said.append)
    before = everything(cache.folder)
    entry = reader.read("programs", KEY)
    assert entry is not None and entry.data["exec"] == RAW
    reader.write("programs", {"n": 2}, {}, {"exec": b"x"})
    assert everything(cache.folder) == before
    blob(cache).write_bytes(b"broken")
    before = everything(cache.folder)
    assert reader.read("programs", KEY) is None
    assert said[0].endswith("; not used")
    assert everything(cache.folder) == before
    absent = Cache(CacheUse("readonly", tmp_path / "absent"), said.append)
    assert absent.read("programs", KEY) is None
    assert not (tmp_path / "absent").exists()


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("LING3_CACHE", "/a/b")
    assert user_cache() == Path("/a/b")
    assert CacheUse(folder=Path("/c")).where == Path("/c")
    monkeypatch.delenv("LING3_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert user_cache() == Path("/x/ling3export")
    monkeypatch.setenv("HOME", "/home/someone")
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert user_cache() == Path("/home/someone/.cache/ling3export")


def writer(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment({}),
    )


def test_a_kill_at_any_point_leaves_only_whole_entries(tmp_path, said):
    moments = random.Random(1)
    for number in range(6):
        process = writer(tmp_path / "cache")
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(moments.uniform(0, 0.04 * (1 + number)))  # the later ones write on a busy machine, too
            process.send_signal(signal.SIGKILL)
        cache = Cache(CacheUse("on", tmp_path / "cache"), said.append)
        for entry in entries(cache.folder, "programs"):
            read = cache.read("programs", entry.key)
            assert read is not None
            assert (read.data["exec"][0], read.data["exec"][:7]) == (read.record["first"], read.data["more"])
    assert said == []
    assert len(list(entries(tmp_path / "cache", "programs"))) == 1


def test_two_that_write_the_same_entry_and_one_that_reads_it_never_meet_half_of_one(tmp_path, said):
    """A blob named by its entry's key would be overwritten between the two files of the other process's entry."""
    cache = Cache(CacheUse("on", tmp_path / "cache"), said.append)
    processes = [writer(cache.folder), writer(cache.folder)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        until, seen = time.monotonic() + 1, set()
        while time.monotonic() < until:
            if entry := cache.read("programs", sha256_of({"n": 1})):
                assert entry.data["exec"][0] == entry.record["first"]
                seen.add(entry.data["exec"])
    finally:
        for process in processes:
            process.kill()
            _, err = process.communicate()
            assert err == ""
    assert len(seen) > 3
    assert said == []


def test_another_users_files_are_used_though_their_time_cannot_be_set(cache, said, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.read("programs", KEY) is not None
    assert said == []

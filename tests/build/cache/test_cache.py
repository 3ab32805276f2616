"""The cache's files are complete or absent, with kills and parallel writers; broken ones are named and made again."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ling3export.artifacts.files import user_cache
from ling3export.artifacts.records import sha256_of
from ling3export.cache.store import Cache, CacheUse
from tests.support.builds import environment

FIELDS = {"cell": {"phase": "decode", "padding": 16}, "toolchain": {"jaxlib": "0.11.2"}}
KEY = sha256_of(FIELDS)
RAW = bytes(range(256)) * 40
# Writes one entry repeatedly, with other bytes each time, since compiling is not reproducible on CPU.
WRITER = """
import os, sys
from pathlib import Path
from ling3export.cache.store import Cache, CacheUse
cache = Cache(CacheUse("on", Path(sys.argv[1])), lambda text: print(text, file=sys.stderr))
print("ready", flush=True)
while True:
    raw = os.urandom(3000)
    cache.write("programs", {"n": 1}, {"first": raw[0]}, raw)
"""


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path, said) -> Cache:
    """A cache with one entry."""
    cache = Cache(CacheUse("on", tmp_path / "cache"), said.append)
    cache.write("programs", FIELDS, {"seconds": 1.5}, RAW)
    return cache


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file."""
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_entry_gives_back_its_record_and_bytes_and_names_its_fields(cache, said):
    entry = cache.read("programs", KEY)
    assert entry is not None
    assert (entry.data, entry.record) == (RAW, {"seconds": 1.5})
    assert json.loads(cache.path("programs", KEY).read_bytes().split(b"\n")[1])["fields"] == FIELDS
    assert cache.read("cells", KEY) is None
    assert cache.read("programs", sha256_of({})) is None
    assert said == []


def sealed(header: bytes, data: bytes = RAW) -> bytes:
    """A file with a right digest, as an attacker who knows the format would write it."""
    body = header + b"\n" + data
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def text(**changes: Any) -> bytes:
    return json.dumps({"version": 3, "fields": FIELDS, "record": {}} | changes).encode()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"), "another digest"),
        (lambda path: path.write_bytes(path.read_bytes()[:100]), "another digest"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"1.5", b"2.5")), "another digest"),
        (lambda path: path.write_bytes(b""), "another digest"),
        (lambda path: path.write_bytes(sealed(b"")), "no entry (JSONDecodeError: "),
        (lambda path: path.write_bytes(sealed(b"[1]")), "no entry (TypeError: "),
        (lambda path: path.write_bytes(sealed(b"{\xff}")), "no entry (UnicodeDecodeError: "),
        (lambda path: path.write_bytes(sealed(text(version=9))), "version 9 instead of 3"),
        (lambda path: path.write_bytes(sealed(text(fields={"n": 2}))), "the fields of another key"),
        (lambda path: path.write_bytes(sealed(b"[" * 10**5)), "more than 16 levels of objects and lists"),
    ],
)
def test_a_broken_entry_is_named_discarded_and_can_be_made_again(cache, said, damage, found):
    path = cache.path("programs", KEY)
    damage(path)
    assert cache.read("programs", KEY) is None
    message = f"cache entry programs/{KEY[:12]}: expected a whole one, found {found}"
    assert len(said) == 1
    assert said[0].startswith(message)
    assert said[0].endswith(f", in {cache.folder}; discarded, it is made again")
    assert not path.exists()
    cache.write("programs", FIELDS, {"seconds": 3}, RAW)
    entry = cache.read("programs", KEY)
    assert entry is not None and (entry.data, entry.record) == (RAW, {"seconds": 3})
    assert len(said) == 1


def test_an_entry_is_not_read_through_a_link(cache, said, tmp_path):
    path, outside = cache.path("programs", KEY), tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    assert cache.read("programs", KEY) is None
    assert "expected a whole one, found a symbolic link" in said[0] and outside.exists() and not path.is_symlink()


def test_readonly_uses_what_is_there_and_changes_nothing(cache, said, tmp_path):
    reader = Cache(CacheUse("readonly", cache.folder), said.append)
    before = everything(cache.folder)
    entry = reader.read("programs", KEY)
    assert entry is not None and entry.data == RAW
    reader.write("programs", {"n": 2}, {}, b"x")
    assert everything(cache.folder) == before
    cache.path("programs", KEY).write_bytes(b"broken")
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
            time.sleep(moments.uniform(0, 0.04 * (1 + number)))  # later ones also get time to write on a busy machine
            process.send_signal(signal.SIGKILL)
        cache = Cache(CacheUse("on", tmp_path / "cache"), said.append)
        if entry := cache.read("programs", sha256_of({"n": 1})):
            assert (entry.data[0], len(entry.data)) == (entry.record["first"], 3000)
    assert said == []
    assert [path.name for path in (tmp_path / "cache/programs").glob("[!.]*")] == [sha256_of({"n": 1})]


def test_two_that_write_the_same_entry_and_one_that_reads_it_never_meet_half_of_one(tmp_path, said):
    """Two writers have different bytes for the same entry, since programs are not reproducible on CPU."""
    cache = Cache(CacheUse("on", tmp_path / "cache"), said.append)
    processes = [writer(cache.folder), writer(cache.folder)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        until, seen = time.monotonic() + 1, set()
        while time.monotonic() < until:
            if entry := cache.read("programs", sha256_of({"n": 1})):
                assert entry.data[0] == entry.record["first"]
                seen.add(entry.data)
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

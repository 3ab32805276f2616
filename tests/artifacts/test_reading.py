"""The one opener of untrusted files, the one JSON reader, and writers that do not follow links."""

import json
import os
import random
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ling3export.artifacts import files, staging
from ling3export.artifacts.files import leftovers, open_own, try_writing, write_error, write_new
from ling3export.artifacts.manifest import MANIFEST
from ling3export.artifacts.staging import staged
from ling3export.foundation import strict_json
from ling3export.foundation.errors import ArtifactError, Ling3Error, printable
from ling3export.foundation.reading import opened, read_bytes
from ling3export.foundation.strict_json import LARGEST, DoubledKeyError, parse_json, read_json
from ling3export.foundation.tables import aligned


def found(folder: Path, name: str, *, links: bool = False) -> str:
    with pytest.raises(OSError, match=r".") as error:
        read_bytes(folder, name, 10, links=links)
    return str(error.value.strerror)


def test_only_regular_files_are_opened_and_nothing_is_waited_for(tmp_path):
    """Regression: a pipe in place of a shard or of config.json hung a build."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "linked").symlink_to("folder")
    (tmp_path / "file").write_bytes(b"0123456789")
    (tmp_path / "folder" / "file").write_bytes(b"inside")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(tmp_path / "socket"))
    expected = {
        "pipe": "a pipe",
        "folder": "a folder",
        "link": "a symbolic link",
        "socket": "a socket",
        "linked/file": "no folder on the way to it",
        "none": "No such file or directory",
        ".": "a folder",
        "folder/../file": "a path that leads out of the folder",
        "/etc/hosts": "a path that leads out of the folder",
    }
    assert {name: found(tmp_path, name) for name in expected} == expected
    assert found(Path("/dev"), "null") == "a device"
    assert (read_bytes(tmp_path, "file", 10), read_bytes(tmp_path, "folder/file", 10)) == (b"0123456789", b"inside")


def test_no_more_than_the_bound_is_read(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    assert found(tmp_path, "sparse") == "more than 10 bytes"


def test_links_lead_no_further_than_the_checkpoint_or_the_blobs_of_its_hub_cache(tmp_path):
    """Regression: ``special_tokens_map.json → id_rsa`` and ``merges.txt → /etc/passwd`` got into artifacts."""
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    for folder in (snapshot, blobs, snapshot / "parts"):
        folder.mkdir(parents=True, exist_ok=True)
    secret = tmp_path / "secret"
    for file in (secret, blobs / "123", snapshot / "parts" / "a", tmp_path / "hub" / "refs"):
        file.write_bytes(b"x")
    links = {"hub": "../../blobs/123", "inside": "parts/a", "out": str(secret), "beside": "../../refs", "loop": "loop"}
    for name, target in links.items():
        (snapshot / name).symlink_to(target)
    assert read_bytes(snapshot, "hub", 10, links=True) == read_bytes(snapshot, "inside", 10, links=True) == b"x"
    assert found(snapshot, "out", links=True) == f"a symbolic link that leads out of the folder, to {secret}"
    assert found(snapshot, "beside", links=True).startswith("a symbolic link that leads out of the folder")
    assert found(snapshot, "loop", links=True) == "a symbolic link"
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").symlink_to(blobs / "123")  # not in a hub's snapshots, so the hub's blobs are outside
    assert found(plain, "config.json", links=True).startswith("a symbolic link that leads out")
    (tmp_path / "hub" / "blobs" / "456").symlink_to(secret)
    (snapshot / "further").symlink_to("../../blobs/456")
    assert found(snapshot, "further", links=True).startswith("a symbolic link that leads out")
    blobs.rename(tmp_path / "moved")
    blobs.symlink_to("/etc")
    (snapshot / "passwd").symlink_to("../../blobs/passwd")
    assert found(snapshot, "passwd", links=True).startswith("a symbolic link that leads out")


def test_a_folder_below_a_link_may_be_opened_by_its_name(tmp_path):
    """Users may name a path through links, such as a linked folder of checkpoints."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a").write_bytes(b"x")
    (tmp_path / "named").symlink_to("real")
    with opened(tmp_path / "named", "a") as file:
        assert file.read() == b"x"


@pytest.mark.parametrize(
    "text", [b'"\\ud800"', b'{"\\uDFFF": 1}', b'["\\ude00\\ud83d"]', b'"\\ud83d\\"\\ude00"', b'"\\ud83d\\\\\\ude00"']
)
def test_half_a_character_is_refused(text):
    """Regression: a lone surrogate as ``eos_token`` raised a UnicodeEncodeError in the tokenizer's library."""
    with pytest.raises(ValueError, match="half a character"):
        parse_json(text)
    assert parse_json(b'"\\ud83d\\ude00 \\\\ud800"') == "😀 \\ud800"


def drawn(rng: random.Random, depth: int) -> Any:
    """A random value; its texts have escapes, and its numbers several notations."""
    if depth and rng.random() < 0.7:
        items = [drawn(rng, depth - 1) for _ in range(rng.randrange(4))]
        return items if rng.random() < 0.5 else {rng.choice(("a", "b", " a", "é", 'q"', "", "x\\")): x for x in items}
    numbers = rng.randrange(-5, 5), 10**25, rng.random(), 1e-7, 1e16, 1e22, -0.0, rng.uniform(-1e300, 1e300)
    return rng.choice((None, True, False, " a b ", "/", "\\ \n", "😀", "\x7f", *numbers))


def test_values_are_those_of_json_and_no_key_is_repeated_at_any_level():
    """msgspec, which is five times as fast, may parse only texts that it parses like JSON."""
    rng, read = random.Random(0), 0
    for _ in range(500):
        value = drawn(rng, 4)
        indent, separators = rng.choice(((None, None), (None, (",", ":")), (1, (" , ", " :\t"))))
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=indent, separators=separators)
        assert repr(parse_json(text.encode())) == repr(json.loads(text))
        read += strict_json.round_trip(text.encode()) is not strict_json.UNREAD
        for doubled in (f'{{"d": {text}, "d": {text}}}', f'[1, {{"e": {{"d":1 ,"d":{text}}}}}]'):
            with pytest.raises(DoubledKeyError) as caught:
                parse_json(doubled.encode())
            assert caught.value.key == "d"
    assert 200 < read < 450, "both ways are tried"


@pytest.mark.parametrize(
    "text",
    [
        b"[" * LARGEST,
        b"[" * (LARGEST // 2) + b"]" * (LARGEST // 2),
        (b"[" * 450 + b"]" * 450 + b",") * (LARGEST // 901),
        b'{"a":' * (LARGEST // 5),
        b"[" + b"1" * (LARGEST - 2) + b"]",
        b" " * (LARGEST + 1),
        b'["' + b'\\"' * 4_000_000,
        b'"' + b"\\" * 8_000_001,
    ],
    ids=["open", "closed", "depth 450", "objects", "digits", "long", "quotes", "backslashes"],
)
def test_deep_and_huge_json_is_refused_before_it_is_parsed(text, tmp_path):
    """Regression: 4 MB of depth 450 took 27 seconds before any digest was checked."""
    (tmp_path / "a.json").write_bytes(text)
    began = time.process_time()
    with pytest.raises((ValueError, OSError), match=r"levels|more than|digits|Unterminated|delimiter"):
        read_json(tmp_path / "a.json")
    assert time.process_time() - began < 2


def test_a_writer_follows_no_link_and_waits_for_no_pipe(tmp_path):
    """Regression: programs were written through a link or a pipe that had their name."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (tmp_path / "link").symlink_to(outside)
    os.link(outside, tmp_path / "second")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "second", "pipe"):
        write_new(tmp_path / name, b"x")
        assert (tmp_path / name).read_bytes() == b"x"
        assert not (tmp_path / name).is_symlink()
    assert outside.read_text() == "mine"
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArtifactError, match="write `folder`: expected a writable file, found Is a directory"):
        write_new(tmp_path / "folder", b"x")


def test_a_file_that_grows_is_a_regular_one_of_this_user(tmp_path, monkeypatch):
    """Refuses paths that lead to files of other users, or to files that other users can read."""
    outside = tmp_path / "outside"
    outside.write_text("mine")
    with open_own(outside, append=True) as file:
        assert (file.read(), file.write(b" too")) == (b"mine", 4)
    (tmp_path / "link").symlink_to(outside)
    os.mkfifo(tmp_path / "pipe")
    os.link(outside, tmp_path / "second")
    for name, found in (("link", "a symbolic link"), ("pipe", "something else"), ("second", "one with 2 names")):
        with pytest.raises(ArtifactError, match=f"write `{name}`: expected .*, found {found}, in "):
            open_own(tmp_path / name)
    (tmp_path / "second").unlink()
    status = os.fstat
    monkeypatch.setattr(os, "fstat", lambda of: os.stat_result([*status(of)[:4], os.geteuid() + 1, *status(of)[5:]]))
    with pytest.raises(ArtifactError, match="expected a file of this user's, found one of user "):
        open_own(outside)
    assert outside.read_text() == "mine too"


def test_trying_to_write_leaves_nothing_even_when_it_is_killed(tmp_path, monkeypatch):
    """Regression: ``.partial-PID-…`` of a killed trial stayed in artifacts and caches forever."""
    monkeypatch.setattr(os, "unlink", lambda *_, **__: pytest.fail("a name was given"))
    try_writing(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_trial_where_files_need_a_name_leaves_one_that_the_next_build_removes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # like a file system without unnamed files
    monkeypatch.setattr(os, "unlink", lambda *_, **__: None)  # as if killed before the removal
    try_writing(tmp_path)
    monkeypatch.undo()
    assert leftovers(tmp_path / "trial") == list(tmp_path.iterdir())
    assert len(leftovers(tmp_path / "trial")) == 1


def test_a_full_disk_is_the_one_that_was_written(tmp_path, monkeypatch):
    """Regression: if the folder did not exist, the error reported the free space of the root file system."""
    asked = []
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=7))
    error = write_error(OSError(28, "No space left on device"), tmp_path / "no" / "such" / "file")
    assert "a full disk (7 bytes free)" in error.message
    assert asked == [tmp_path]


def written(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_text(json.dumps({"producer": {"ling3export": "0"}, "text": text}))


def test_force_has_a_whole_artifact_under_the_name_at_every_moment(tmp_path, monkeypatch):
    """Regression: ``--force``, killed between its renames, left no artifact; the next build removed both copies."""
    with staged(tmp_path / "a.ling3") as partial:
        written(partial, "old")
    before = []
    rename = staging.rename

    def watched(old: Path, new: Path) -> None:
        before.append(str(new))
        rename(old, new)

    monkeypatch.setattr(staging, "rename", watched)
    with staged(tmp_path / "a.ling3", force=True) as partial:
        written(partial, "new")
    assert before == [], "a rename away from the name leaves it free for a moment"
    assert json.loads((tmp_path / "a.ling3" / MANIFEST).read_text())["text"] == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.ling3"]


def test_no_terminal_escape_of_a_file_is_printed():
    """Regression: names of tensors and files could move the cursor, set the title, or hide earlier output."""
    evil = "x\x1b]0;owned\x07\x9b2J\u202e\ud800\r"
    error = Ling3Error(f"tensor `{evil}`: expected one", evil)
    table = aligned([(evil, "1")])[0]
    for text in (error.message, error.hint or "", str(error), table, printable(evil)):
        assert "x\\x1b]0;owned\\x07\\x9b2J\\u202e\\ud800\\r" in text
        assert text.replace("\n", "").isprintable()
    assert printable("two\nlines of 中文") == "two\nlines of 中文"

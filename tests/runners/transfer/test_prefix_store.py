"""Prefixes in a folder: a later process hits prefixes of an earlier one, and incomplete files are never used."""

import errno
import os
import threading

import pytest

from ling3export.foundation.errors import ArtifactError, Ling3Error
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request
from ling3export.runners.transfer import folder as folders
from ling3export.runners.transfer.folder import PARTIAL, PREFIX, FolderStore
from ling3export.runners.transfer.options import PrefixFolder
from tests.support.transfers import DESCRIPTION, LAYOUT, put, random_state

TOLD = {"check": "programs", "report": lambda text: None}
PROMPT = tuple(range(20, 90))
LIMIT = 1 << 30


@pytest.fixture(scope="module")
def alone(artifact):
    """Tokens of prompts without a cache."""
    with Engine(artifact("micro-tp1-snapshots"), prefix_cache=False, **TOLD) as engine:
        yield lambda *prompts: [each.token_ids for each in engine.complete([ask(prompt) for prompt in prompts])]


def ask(prompt, salt=""):
    return Request(tuple(prompt), 6, ignore_eos=True, cache_salt=salt)


def opened(artifact, folder, limit=LIMIT, name="micro-tp1-snapshots"):
    return Engine(artifact(name), prefix_store=PrefixFolder(folder, limit), **TOLD)


def test_a_later_engine_of_another_tp_hits_what_an_earlier_one_knew(artifact, alone, tmp_path):
    with opened(artifact, tmp_path / "known") as engine:
        (first,) = engine.complete([ask(PROMPT)])
    with opened(artifact, tmp_path / "known", name="micro-tp2-snapshots") as engine:
        (second,) = engine.complete([ask(PROMPT)])
        assert (first.cached_tokens, second.cached_tokens) == (0, 64)
        assert second.kv_transfer_params is None
        (third,) = engine.complete([ask(PROMPT)])
        (salted,) = engine.complete([ask(PROMPT, "mine")])
        (branch,) = engine.complete([ask([*PROMPT[:60], 7, 8, 9])])
        stats = engine.stats()
    assert (third.cached_tokens, salted.cached_tokens) == (64, 0)
    assert (stats["prefix_store"]["loaded"], stats["prefix_cache"]["hits"]) == (1, 2), "the third one hit the cache"
    assert first.token_ids == second.token_ids == third.token_ids == salted.token_ids == alone(PROMPT)[0]
    assert branch.cached_tokens == 0, "no state lies between the blocks"
    with opened(artifact, tmp_path / "known") as engine:  # it has the state that the branch wrote
        (again,) = engine.complete([ask([*PROMPT[:60], 7, 8, 9])])
    assert again.cached_tokens == 48 and again.token_ids == branch.token_ids == alone([*PROMPT[:60], 7, 8, 9])[0]


def test_damage_is_a_miss_and_is_written_again(artifact, alone, tmp_path):
    folder, (right,) = tmp_path / "known", alone(PROMPT)
    with opened(artifact, folder) as engine:
        engine.complete([ask(PROMPT)])
    left = folder / f"{PREFIX}{'0' * 32}.00000000{PARTIAL}"  # a file of a writer that was killed
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    whole = {path.name: path.stat().st_size for path in folder.glob(f"{PREFIX}*.safetensors")}
    victim = folder / min(whole)
    victim.write_bytes(victim.read_bytes()[:-1] + b"\x55\x55")
    with opened(artifact, folder) as engine:
        assert not left.exists()
        (done,) = engine.complete([ask(PROMPT)])
        counted = engine.stats()["prefix_store"]
    assert (done.token_ids, done.cached_tokens, counted["corrupt"]) == (right, 0, 1)
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == whole
    with opened(artifact, folder) as engine:
        (done,) = engine.complete([ask(PROMPT)])
    assert (done.token_ids, done.cached_tokens) == (right, 64)


def test_two_engines_on_one_small_folder_stay_within_it_and_right(artifact, alone, tmp_path):
    """The folder holds three prompts' states of eight; both engines write, read and evict."""
    prompts = [[*range(n, n + 33 + n)] for n in range(8)]
    expected, folder = alone(*prompts), tmp_path / "known"
    with opened(artifact, folder) as engine:
        engine.complete([ask(prompts[0])])
    limit = 3 * sum(path.stat().st_size for path in folder.iterdir())
    found: dict[int, list] = {}

    def run(number):
        with opened(artifact, folder, limit) as engine:
            found[number] = [engine.complete([ask(prompts[(at * (number + 1)) % 8])])[0].token_ids for at in range(16)]
            found[number].append(engine.stats()["prefix_store"])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (*tokens, counted) in found.items():
        assert tokens == [expected[(at * (number + 1)) % 8] for at in range(16)]
        assert counted["stored"] > 0 and "failed" not in counted
    assert sum(counted.get("evicted", 0) for *_, counted in found.values()) > 0
    largest = max(path.stat().st_size for path in folder.iterdir())
    assert sum(path.stat().st_size for path in folder.iterdir()) <= limit + 4 * largest


def test_a_state_whose_beginning_is_gone_is_a_miss_and_is_written_again(artifact, alone, tmp_path):
    """Each file has the latents since the snapshot before, so that without that one it is useless."""
    folder, longer = tmp_path / "known", [*PROMPT, *range(100, 132)]
    with opened(artifact, folder) as engine:
        engine.complete([ask(PROMPT)])
    (first,) = folder.iterdir()
    with opened(artifact, folder) as engine:
        engine.complete([ask(longer)])
    assert len([*folder.iterdir()]) == 2
    first.unlink()
    for cached in (0, 96):
        with opened(artifact, folder) as engine:
            (done,) = engine.complete([ask(longer)])
        assert (done.token_ids, done.cached_tokens) == (alone(longer)[0], cached)


def test_the_least_recently_used_prefix_is_removed_first(tmp_path):
    end, names = FolderStore(LAYOUT, DESCRIPTION, tmp_path), [f"{number:032x}" for number in range(4)]
    for at, name in enumerate(names):
        assert put(end, name, random_state())
        os.utime(tmp_path / f"{PREFIX}{name}.safetensors", (at, at))
    (size,) = {path.stat().st_size for path in tmp_path.iterdir()}
    assert end.touch([names[0]]) == set()
    assert end.trim(2 * size) == {*names[1:3]} and end.counts["evicted"] == 2
    assert [end.has(name) for name in names] == [True, False, False, True]
    assert end.touch(names) == {*names[1:3]}


def test_impossible_settings_of_a_prefix_store_are_refused(artifact, tmp_path):
    with pytest.raises(
        Ling3Error, match=r"^prefix store: expected a limit of at least [0-9,]+, a block and a snapshot, found 9"
    ):
        opened(artifact, tmp_path / "known", 9)
    with pytest.raises(
        ArtifactError, match=r"^prefix store: expected a prefix cache, found it off or without snapshots"
    ):
        Engine(artifact("micro-tp1-snapshots"), prefix_cache=False, prefix_store=PrefixFolder(tmp_path), **TOLD)


def test_files_that_cannot_be_read_now_are_computed_again_and_stay(artifact, alone, tmp_path, monkeypatch):
    """Regression: if no file descriptor was free (EMFILE), the file and its whole chain were removed."""
    folder, (right,) = tmp_path / "known", alone(PROMPT)
    with opened(artifact, folder) as engine:
        engine.complete([ask(PROMPT)])
    before = {path.name for path in folder.iterdir()}

    def busy(*where):
        raise OSError(errno.EMFILE, "Too many open files")

    with opened(artifact, folder) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(folders, "opened", busy)
            (done,) = engine.complete([ask(PROMPT, "")])
        assert (done.token_ids, done.cached_tokens) == (right, 0)
        assert engine.stats()["prefix_store"]["unreadable"] >= 1
    assert before <= {path.name for path in folder.iterdir()}
    with opened(artifact, folder) as engine:
        (done,) = engine.complete([ask(PROMPT)])
    assert (done.token_ids, done.cached_tokens) == (right, 64)

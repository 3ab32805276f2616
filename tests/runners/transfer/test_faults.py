"""Faults of one end: every one ends by its deadline, is counted by its reason, and changes nothing that is read later.

``python -m tests.support.transfer_faults COUNT`` injects each fault COUNT times; these are one of each.
"""

import pytest
from click.testing import CliRunner

from ling3export.runners.cli.main import main
from tests.support import transfer_faults
from tests.support.transfers import BACKENDS, backend, keys, segment, write


@pytest.mark.parametrize("name", transfer_faults.FAULTS)
def test_a_fault_is_a_counted_miss_in_time(name, tmp_path):
    outcome = transfer_faults.inject(name, seed=1, folder=tmp_path)
    assert outcome.wrong == "", outcome
    assert outcome.seconds < transfer_faults.DEADLINE + transfer_faults.GRACE
    assert outcome.left == []


def run(*words: str):
    done = CliRunner().invoke(main, ["transfer", "gc", *words])
    assert done.exit_code == 0, done.output
    return done


def test_gc_removes_what_is_dead_and_orphaned_and_prints_it(tmp_path):
    dead, kept = transfer_faults.orphan(seed=2, ready=False), transfer_faults.orphan(seed=3, ready=True)
    mine = keys()[0]
    end = backend("shm", tmp_path)
    try:
        assert write(end, mine)
        for key in (dead, kept):
            assert segment(key).name in run("--dry-run").stdout and segment(key).exists()
        told = run()
        for key in (dead, kept):
            assert segment(key).name in told.stdout and not segment(key).exists()
        assert "is gone" in told.stdout and "freed" in told.stderr
        assert segment(mine).name not in told.stdout and segment(mine).exists()
    finally:
        end.close()


def test_gc_of_a_folder_keeps_whole_objects(tmp_path):
    end, key = backend("file", tmp_path), keys()[0]
    assert write(end, key)
    (tmp_path / f"l3x_{'0' * 32}.safetensors").write_bytes(b"no object")
    (tmp_path / "mine.txt").write_text("a user's own")
    told = run("--folder", str(tmp_path))
    assert f"l3x_{'0' * 32}.safetensors\t9 bytes\tno object" in told.stdout
    assert {path.name for path in tmp_path.iterdir()} == {f"{key.name}.safetensors", "mine.txt"}


def test_gc_wants_a_folder():
    done = CliRunner().invoke(main, ["transfer", "gc", "--folder", "nowhere"])
    assert (done.exit_code, done.stderr) == (1, "error: --folder `nowhere`: expected a folder, found none\n")


def test_every_backend_has_a_flipped_byte():
    assert {f"flipped byte, {name}" for name in BACKENDS} <= {*transfer_faults.FAULTS}

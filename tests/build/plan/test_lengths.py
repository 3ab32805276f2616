"""What a histogram of lengths wastes: against the runner's own scheduler; better paddings: against every choice."""

import itertools
import random

import pytest

from ling3export.artifacts.paddings import CALL, Shapes
from ling3export.foundation.errors import PlanError
from ling3export.plan.paddings import (
    Histogram,
    Length,
    Padded,
    best_paddings,
    calls,
    chunked,
    decode_waste,
    grid,
    prefill_waste,
    read_lengths,
    split_by_context,
)
from tests.support.scheduler_rig import Rig

FIELDS = ("calls", "padded", "wasted")
PADDINGS, DECODE = (16, 48, 128), (4, 8)
HISTOGRAM = [Length(1, 1, 2), Length(16, 3, 1), Length(17, 9, 3), Length(129, 2, 1), Length(300, 5, 2)]


def scheduled(groups):
    """Counters of the runner's scheduler over groups of requests, each group waiting at once."""
    slots = max(map(len, groups))
    rig = Rig(slots, slots * 32, 16, PADDINGS, DECODE, context=slots * 512, chunk=16)
    for group in groups:
        for prompt, output in group:
            rig.submit((1,) * prompt, output)
        rig.run()
    return rig.counters.cells


def requests():
    return [(length.prompt_tokens, length.output_tokens) for length in HISTOGRAM for _ in range(length.count)]


def test_requests_alone_waste_what_the_runner_wastes_on_them():
    cells = scheduled([[request] for request in requests()])
    found = prefill_waste(HISTOGRAM, PADDINGS)
    for padding, row in found.paddings.items():
        cell = cells[f"prefill@{padding}"]
        assert row == Padded(cell.calls, cell.slots, cell.slots - cell.used), padding
    prefill = [cell for name, cell in cells.items() if name.startswith("prefill")]
    assert found.alone == Padded(*(sum(getattr(row, name) for row in found.paddings.values()) for name in FIELDS))
    assert found.alone.calls == sum(cell.calls for cell in prefill)
    assert found.tokens == sum(prompt for prompt, _ in requests())
    decoded = decode_waste(HISTOGRAM, DECODE, 8)
    cell = cells["decode@4"]
    assert (decoded.alone_padding, decoded.alone) == (4, Padded(cell.calls, cell.slots, cell.slots - cell.used))
    assert decoded.rows == cell.used


def test_requests_that_wait_together_waste_what_the_runner_wastes_on_them():
    together = [(prompt, 1) for prompt, _ in requests()]
    cells = {name: cell for name, cell in scheduled([together]).items() if name.startswith("prefill")}
    slots = sum(cell.slots for cell in cells.values())
    used = sum(cell.used for cell in cells.values())
    calls = sum(cell.calls for cell in cells.values())
    assert prefill_waste(HISTOGRAM, PADDINGS).packed == Padded(calls, slots, slots - used)


@pytest.mark.parametrize(("running", "padding", "slots"), [(3, 4, 47), (5, 8, 56), (8, 8, 35), (20, 8, 35)])
def test_decode_with_many_running(running, padding, slots):
    """35 rows are decoded; more than the largest padding take turns in full calls."""
    found = decode_waste(HISTOGRAM, DECODE, running)
    assert (found.running, found.full_padding) == (min(running, 8), padding)
    assert found.full == Padded(-(-35 // min(running, 8)), slots, slots - 35)


def test_calls_of_a_prompt():
    assert [calls(slots, PADDINGS) for slots in (16, 32, 144)] == [[(16, 1)], [(48, 1)], [(128, 1), (16, 1)]]
    assert calls(16 * 10**9, PADDINGS) == [(128, 124_999_999), (128, 1)]


def cost(lengths, paddings):
    """By the runner's own choices, one call after the other."""
    shapes = Shapes(paddings, (), 16)
    total = 0
    for length in lengths:
        left = chunked(length.prompt_tokens)
        while left > 0:
            padding = shapes.cheapest_padding(left)
            total += length.count * (padding + CALL)
            left -= padding
    return total


@pytest.mark.parametrize("seed", range(12))
def test_no_set_of_paddings_costs_less(seed):
    rng = random.Random(seed)
    largest = 16 * rng.randint(2, 9)
    lengths = [Length(rng.randint(1, 16 * 14), 1, rng.randint(1, 50)) for _ in range(rng.randint(1, 12))]
    count = rng.randint(1, 4)
    found = best_paddings(lengths, count, largest)
    assert found is not None
    sets = [each for size in range(1, count + 1) for each in itertools.combinations(range(16, largest + 1, 16), size)]
    assert found in sets
    histogram = Histogram(lengths, largest)
    assert [histogram.cost(each) for each in sets] == [cost(lengths, each) for each in sets]
    assert histogram.cost(found) == min(cost(lengths, each) for each in sets)


def test_better_paddings_count_calls():
    """The fewest padded slots alone would always be had with prefill@16, twenty calls for a prompt of 317."""
    assert best_paddings([Length(317, 1, 5)], 3, 512) == (320,)
    assert best_paddings([Length(317, 1, 5)], 3, 128) == (64, 128)


def test_a_large_padding_is_searched_on_a_coarser_grid_and_then_moved():
    assert [grid(3, largest) for largest in (512, 784, 8192)] == [16, 16, 176]
    lengths = [Length(100, 1, 900), Length(1000, 1, 50), Length(2500, 1, 9)]
    assert best_paddings(lengths, 3, 4096) == (112, 1008, 2512)  # of no grid but 16
    assert best_paddings(lengths, 3, 8208) is None


def test_a_histogram_is_read_and_equal_lengths_are_added_up(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text(
        '{"prompt_tokens": 317, "output_tokens": 50, "count": 3}\n\n{"output_tokens": 50, "prompt_tokens": 317}\n'
        '{"prompt_tokens": 5, "output_tokens": 1}\n'
    )
    lengths = read_lengths(path)
    assert lengths == [Length(5, 1, 1), Length(317, 50, 4)]
    assert split_by_context(lengths, 100) == ([Length(5, 1, 1)], 4)
    assert [chunked(n) for n in (1, 16, 17)] == [16, 16, 32]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "{",
            "--lengths: expected JSON, found Expecting property name enclosed in double quotes: line 1 column 2 "
            "(char 1), in line 2 of x.jsonl",
        ),
        ("[1]", "--lengths: expected an object, found a list of 1, in line 2 of x.jsonl"),
        ('{"prompt_tokens": 1}', "--lengths: expected the field output_tokens, found none, in line 2 of x.jsonl"),
        (
            '{"prompt_tokens": 0, "output_tokens": 1}',
            "--lengths: expected a number from 1 to 1,099,511,627,776, found 0, at prompt_tokens, in line 2 of x.jsonl",
        ),
        (
            '{"prompt_tokens": 1, "output_tokens": 1.0}',
            "--lengths: expected a whole number, found 1.0, at output_tokens, in line 2 of x.jsonl",
        ),
    ],
)
def test_what_is_no_histogram_is_refused_with_its_line(tmp_path, line, message):
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt_tokens": 1, "output_tokens": 1}\n' + line)
    with pytest.raises(PlanError) as caught:
        read_lengths(path)
    assert caught.value.message == message
    assert caught.value.hint == 'a line is {"prompt_tokens": 317, "output_tokens": 50, "count": 3}'


def test_a_histogram_that_is_empty_or_absent_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(PlanError, match="expected at least one line, found none"):
        read_lengths(tmp_path / "x.jsonl")
    with pytest.raises(PlanError) as caught:
        read_lengths(tmp_path / "no.jsonl")
    assert str(caught.value) == (
        f"--lengths `no.jsonl`: expected a readable file, found No such file or directory, in {tmp_path}"
    )

"""The inputs of programs: the best padding of a call, also with running sequences, and fields of the step contract."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.paddings import Shapes
from ling3export.runners.engine.inputs import GREEDY, Span, decode_fields, fitting, prefill_fields, sample_fields


@pytest.mark.parametrize(
    ("work", "padding"),
    [(1, 16), (17, 16), (48, 16), (64, 128), (128, 128), (130, 128), (432, 128), (448, 512), (512, 512), (4000, 512)],
)
def test_the_padding_that_pays(work, padding):
    assert Shapes((16, 128, 512), (16,), 16).cheapest_padding(work) == padding


@pytest.mark.parametrize(("work", "padding"), [(17, 16), (64, 128), (130, 128), (4000, 128)])
def test_no_longer_call_than_pays_next_to_running_sequences(work, padding):
    """The costs per slot are 3, 1.25 and 1.0625, so a call of 128 wastes less than a quarter."""
    assert Shapes((16, 128, 512), (16,), 16).cheapest_padding(work, beside_decode=True) == padding
    assert Shapes((16, 512), (16,), 16).cheapest_padding(4000, beside_decode=True) == 512


def test_the_padding_that_pays_by_the_compilers_estimates():
    """If a call costs the same at any padding, the largest is best; the costs are in a manifest."""
    target = next(iter(read_manifest(Path(__file__).parents[2] / "data").targets.values()))
    some = next(iter(target.cells.values()))
    cells = {
        f"{phase}@{padding}": replace(some, phase=phase, padding=padding, estimate=SimpleNamespace(seconds=cost))
        for phase, padding, cost in (("prefill", 16, 2e-3), ("prefill", 512, 2e-3), ("decode", 8, 1e-3))
    }
    shapes = Shapes.of(replace(target, cells=cells))
    assert [shapes.cheapest_padding(work) for work in (16, 17, 600)] == [512, 512, 512]


def test_fitting():
    assert [fitting(work, (16, 128, 512)) for work in (1, 16, 17, 512, 513)] == [16, 16, 128, 512, 512]


def lists(fields):
    return {name: value.tolist() for name, value in fields.items()}


PREFILL = {
    "tokens": [1, 2, 3, 4, 5, 6, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0],
    "chunk_slot": [2, 2, 1, 0],
    "chunk_start": [0, 4, 9, 0],
    "chunk_len": [4, 2, 1, 0],
    "fresh": [1, 0, 0, 0],
    "page_table": [[3, 4, 0], [3, 4, 0], [5, 6, 7], [0, 0, 0]],
}


PAGES = np.array([[0, 0, 0], [5, 6, 7], [3, 4, 0]], np.int32)  # of slots 0, 1 and 2


def test_each_sequence_of_a_prefill_call_begins_with_a_chunk():
    spans = [Span(2, 0, range(1, 7)), Span(1, 9, [7])]
    fields = prefill_fields(16, spans, 4, PAGES)
    assert lists(fields) == PREFILL
    assert {value.dtype for value in fields.values()} == {np.dtype(np.int32)}


def test_a_score_call_also_has_the_tokens_to_score():
    spans = [Span(2, 0, range(1, 7), [-1, -1, 4, 5, 6, 8]), Span(1, 9, [7], [-1])]
    scored = [-1, -1, 4, 5, 6, 8, *[-1] * 10]
    assert lists(prefill_fields(16, spans, 4, PAGES, score=True)) == {**PREFILL, "next_token": scored}


def test_rows_of_decode_and_sample_calls():
    decode = {
        "slot": [2, 0, 1, 0],
        "position": [8, 0, 2, 0],
        "token": [-1, 0, 17, 0],
        "page_table": [[3, 4, 0], [0, 0, 0], [5, 6, 7], [0, 0, 0]],
    }
    assert lists(decode_fields(4, [2, 0, 1], [8, 0, 2], PAGES, [-1, 0, 17])) == decode
    assert lists(decode_fields(3, [2, 1], [8, 2], PAGES)) == {
        "slot": [2, 1, 0],
        "position": [8, 2, 0],
        "token": [-1, -1, 0],
        "page_table": [[3, 4, 0], [5, 6, 7], [0, 0, 0]],
    }
    sampling = np.full(4, GREEDY)
    sampling[3] = 0.5, 40, 0.25, 0.125, (1 << 32) - 1
    fields = sample_fields(2, [1], [3], [9], sampling)
    assert lists(fields) == {
        "slot": [0, 3],
        "position": [0, 9],
        "temperature": [0, 0.5],
        "top_k": [0, 40],
        "top_p": [1, 0.25],
        "min_p": [0, 0.125],
        "seed": [0, -1],
    }
    greedy = {"temperature": [0, 0], "top_k": [0, 0], "top_p": [1, 1], "min_p": [0, 0], "seed": [0, 0]}
    assert lists(sample_fields(2, [1], [3], [9])) == lists(fields) | greedy
    dtypes = {name: value.dtype.name for name, value in fields.items()}
    assert dtypes == dict.fromkeys(fields, "int32") | dict.fromkeys(("temperature", "top_p", "min_p"), "float32")

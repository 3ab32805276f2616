"""Workloads: equal seeds give equal requests, lengths are the requested ones, and bad data sets are refused."""

import math
from itertools import pairwise

import pytest

from ling3export.checkpoint.synth_tokenizer import write_tokenizer
from ling3export.foundation.errors import RequestError
from ling3export.runners.bench_serving.measure import workload_digest
from ling3export.runners.bench_serving.prefixes import repetition
from ling3export.runners.bench_serving.workloads import PromptLimits, SampleRequest, WorkloadSpec, arrivals, requests_of
from ling3export.runners.text.vocabulary import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 320)
    return Tokenizer((folder / "tokenizer.json").read_bytes())


def limits(tokenizer, context=4096):
    return PromptLimits(context, 320, tokenizer)


GROUPS = {"groups": 4, "prefix_len": 30, "suffix_len": 10, "output_len": 8}
RANDOM = {"input_len": 50, "output_len": 20, "range_ratio": 0.5}


SETTINGS = {"random": RANDOM, "shared-prefix": GROUPS, "text": GROUPS | {"workload": "shared-prefix", "text": True}}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_seed_decides_the_requests(name, tokenizer):
    settings = {"workload": name, "num_prompts": 40} | SETTINGS[name]
    specs = [WorkloadSpec(**settings, seed=seed) for seed in (0, 0, 1)]
    made = [workload_digest(requests_of(spec, limits(tokenizer))) for spec in specs]
    assert made[0] == made[1] != made[2]


def test_random_prompts_are_neighbours_without_special_ids(tokenizer):
    model = limits(tokenizer)
    asks = requests_of(WorkloadSpec(num_prompts=200, **RANDOM), model)
    lengths = [len(ask.prompt) for ask in asks]
    assert (min(lengths), max(lengths)) == (25, 50)
    assert {ask.output for ask in asks} == set(range(10, 21))
    ids = model.ids()
    assert set(ids).isdisjoint(tokenizer.special_ids) and len(tokenizer.special_ids) > 0
    for ask in asks:
        places = [ids.index(token) for token in ask.prompt]
        assert all((after - before) % len(ids) == 1 for before, after in pairwise(places))
    assert min(ask.output for ask in requests_of(WorkloadSpec(num_prompts=500, input_len=5, output_len=3), model)) == 1


def test_prefixes_of_token_ids_repeat(tokenizer):
    spec = WorkloadSpec(workload="shared-prefix", num_prompts=41, groups=4, prefix_len=40, suffix_len=20)
    asks = requests_of(spec, limits(tokenizer))
    assert {len(ask.prompt) for ask in asks} == {60}
    found = repetition([ask.prompt for ask in asks], 10, 30)
    assert [(len(prefix), count) for prefix, count in found.prefixes] == [(40, 10)] * 4


def test_lines_are_sent_in_their_order(tmp_path, tokenizer):
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "a", "output_len": 3}\n{"prompt": [1, 2], "output_len": 4}')
    asks = requests_of(WorkloadSpec(workload="jsonl", data=file), limits(tokenizer))
    assert asks == [SampleRequest("a", 3), SampleRequest((1, 2), 4)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found nothing"),
        ("[]", "found nothing"),
        ("[1]", "found others"),
        ("{", "in line 1"),
        ('{"prompt": "a", "output_len": 1}\nx', "in line 2"),
        ('{"prompt": "a"}', "expected `output_len`, a whole number above 0, found None"),
        ('{"prompt": "a", "output_len": true}', "expected `output_len`, a whole number above 0, found True"),
        ('{"prompt": [], "output_len": 1}', "expected `prompt`, a text or token ids"),
        ('{"prompt": [true], "output_len": 1}', "expected `prompt`, a text or token ids"),
    ],
)
def test_an_invalid_data_set_is_refused(text, message, tmp_path, tokenizer):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(RequestError, match=message):
        requests_of(WorkloadSpec(workload="jsonl", data=file), limits(tokenizer))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input_len": 60, "output_len": 5}, r"context of 64 tokens, found 60 \+ 5 = 65"),
        ({"workload": "shared-prefix", "num_prompts": 40, "groups": 50}, "at least 50 requests for as many groups"),
    ],
)
def test_requests_without_room_are_refused(settings, message, tokenizer):
    with pytest.raises(RequestError, match=message):
        requests_of(WorkloadSpec(**{"output_len": 1} | settings), limits(tokenizer, 64))
    with pytest.raises(RequestError, match="--text: there is no tokenizer"):
        requests_of(WorkloadSpec(text=True), limits(None))


def test_arrivals_have_the_rate_that_was_asked_for():
    assert arrivals(200, math.inf, 0) == [0] * 200
    times = arrivals(200, 10.0, 0)
    assert times[-1] == pytest.approx(20) and times == sorted(times)
    assert times == arrivals(200, 10.0, 0) != arrivals(200, 10.0, 1)
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean**2 == pytest.approx(1, rel=0.5)

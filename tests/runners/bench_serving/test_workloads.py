"""Workloads: the same seed gives the same requests, lengths are what was asked for, bad data sets are refused."""

import json
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


@pytest.fixture
def talks(tmp_path):
    """Conversations of two to four turns, one of one turn, one of a short answer, one too long."""
    file, dialogs = tmp_path / "talks.json", []
    for number in range(20):
        turns = [f"What is {number}?", "A number, and no other. " * (1 + number % 3), "And then?", "Nothing."]
        dialogs.append({"conversations": [{"from": "human", "value": turn} for turn in turns[: 2 + number % 3]]})
    dialogs += [{"conversation": [{"from": "human", "value": "alone"}]}, {"id": 7}]
    dialogs += [{"conversations": [{"value": "a question"}, {"value": "."}]}]
    dialogs += [{"conversations": [{"value": "long " * 5000}, {"value": "an answer"}]}]
    file.write_text(json.dumps(dialogs))
    return file


LINE = '{"prompt": "a", "output_len": 1'
SETTINGS = {
    "random": RANDOM,
    "sharegpt": {},
    "generated-shared-prefix": GROUPS,
    "readable": GROUPS | {"workload": "generated-shared-prefix", "readable": True},
    "prefix-repetition": GROUPS,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_seed_gives_the_same_requests_and_another_others(name, tokenizer, talks):
    settings = {"workload": name, "num_prompts": 40, "data": talks} | SETTINGS[name]
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


def test_conversations_that_do_not_serve_are_left_out(tokenizer, talks):
    def made(context=4096, **settings):
        return requests_of(WorkloadSpec(workload="sharegpt", data=talks, **settings), limits(tokenizer, context))

    asks = made()
    assert len(asks) == 20
    answers = {f"What is {number}?": "A number, and no other. " * (1 + number % 3) for number in range(20)}
    assert {ask.prompt: ask.output for ask in asks} == {
        prompt: len(tokenizer.encode(answer, special=False)) for prompt, answer in answers.items()
    }
    assert {ask.output for ask in made(output_len=5)} == {5}
    with pytest.raises(RequestError, match="expected answers of 4 tokens or more, found 3"):
        made(output_len=3)
    with pytest.raises(RequestError, match="expected conversations of two turns that fit into 4 tokens, found none"):
        made(4)


@pytest.mark.parametrize("readable", [False, True])
def test_groups_of_prompts_are_the_leaves_that_the_measure_finds(tokenizer, readable):
    spec = WorkloadSpec(
        workload="generated-shared-prefix", num_prompts=41, groups=4, prefix_len=40, suffix_len=20, readable=readable
    )
    asks = requests_of(spec, limits(tokenizer))
    texts = [ask.prompt for ask in asks]
    assert len(texts) == len(set(texts)) == 40
    found = repetition(texts, 10, 20)
    assert [count for _, count in found.prefixes] == [10] * 4
    assert all("\n\n" in prefix for prefix, _ in found.prefixes)
    assert found.coverage == 1


def test_prefixes_of_token_ids_repeat(tokenizer):
    spec = WorkloadSpec(workload="prefix-repetition", num_prompts=41, groups=4, prefix_len=40, suffix_len=20)
    asks = requests_of(spec, limits(tokenizer))
    assert {len(ask.prompt) for ask in asks} == {60}
    found = repetition([ask.prompt for ask in asks], 10, 30)
    assert [(len(prefix), count) for prefix, count in found.prefixes] == [(40, 10)] * 4


def test_lines_say_when_they_are_sent(tmp_path, tokenizer):
    file = tmp_path / "trace.jsonl"
    lines = [{"prompt": "a", "output_len": 3, "timestamp": 10}, {"prompt": [1, 2], "output_len": 4, "timestamp": 10.5}]
    file.write_text("\n".join(map(json.dumps, lines)))
    asks = requests_of(WorkloadSpec(workload="jsonl", data=file), limits(tokenizer))
    assert asks == [SampleRequest("a", 3, 0), SampleRequest((1, 2), 4, 0.5)]
    assert arrivals(asks, math.inf, 1.0, 0) == [0, 0.5]
    with pytest.raises(RequestError, match="request rate: expected none beside the workload's timestamps, found 3"):
        arrivals(asks, 3.0, 1.0, 0)


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
        ('{"prompt": "a", "output_len": 1, "timestamp": "1"}', "expected `timestamp`, a number of seconds, found 1"),
        (f'{LINE}, "timestamp": 1}}\n{LINE}}}', "in all lines or in none"),
        (f'{LINE}, "timestamp": 1}}\n{LINE}, "timestamp": 0}}', "timestamps that ascend"),
    ],
)
def test_a_data_set_that_is_none_is_refused(text, message, tmp_path, tokenizer):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(RequestError, match=message):
        requests_of(WorkloadSpec(workload="jsonl", data=file), limits(tokenizer))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input_len": 60, "output_len": 5}, r"context of 64 tokens, found 60 \+ 5 = 65"),
        ({"workload": "prefix-repetition", "num_prompts": 40, "groups": 50}, "at least 50 requests, found 40"),
        (
            {"workload": "generated-shared-prefix", "num_prompts": 2000, "groups": 2, "prefix_len": 1, "suffix_len": 1},
            "expected texts of 1 tokens that differ, found too few",
        ),
    ],
)
def test_what_has_no_room_is_refused(settings, message, tokenizer):
    with pytest.raises(RequestError, match=message):
        requests_of(WorkloadSpec(**{"output_len": 1} | settings), limits(tokenizer, 64))
    with pytest.raises(RequestError, match="workload `sharegpt`: expected a tokenizer, found none"):
        requests_of(WorkloadSpec(workload="sharegpt"), limits(None))


def test_arrivals_have_the_rate_that_was_asked_for():
    asks = [SampleRequest("a", 1)] * 200
    assert arrivals(asks, math.inf, 1.0, 0) == [0] * 200
    for burstiness in (0.3, 1.0, 5.0):
        times = arrivals(asks, 10.0, burstiness, 0)
        assert times[-1] == pytest.approx(20) and times == sorted(times)
        assert times == arrivals(asks, 10.0, burstiness, 0) != arrivals(asks, 10.0, burstiness, 1)
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        variation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean**2
        assert variation == pytest.approx(1 / burstiness, rel=0.5)

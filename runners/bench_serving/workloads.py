"""What a run sends: prompts and lengths of answers, and when. The same seed gives the same requests, to the byte.

Nothing made here is kept between runs, so that no run can get what was made from another seed or tokenizer.
"""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ling3export.foundation.errors import RequestError
from ling3export.foundation.reading import opened
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.text.vocabulary import Tokenizer

LARGEST = 4 << 30  # bytes of a data set
SHORTEST = 2  # tokens of a prompt and of an answer, below which sharegpt's conversations are left out
DEFAULT_OUTPUT = 64  # tokens of an answer
LEAST_FIXED = 4  # tokens of an answer whose length is fixed for sharegpt
WORDS = (
    "amber anchor apple arrow autumn basket beacon bridge candle canyon castle cedar cherry cloud copper coral cotton "
    "desert dragon eagle ember falcon feather field forest garden ginger granite harbor hazel honey island ivory "
    "jasmine kettle lantern lemon maple marble meadow mirror mountain needle oasis ocean olive orchard pebble pepper "
    "planet puzzle quartz ribbon river saddle silver spring summer temple thunder timber tunnel valley velvet violet "
    "walnut willow winter yellow"
).split()


@dataclass(frozen=True)
class SampleRequest:
    """A request of a workload.

    Attributes:
        prompt: A text, or token ids.
        output: Most tokens of its answer.
        at: Seconds after the run's start, where the workload itself says when.
    """

    prompt: str | tuple[int, ...]
    output: int
    at: float | None = None


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """What is sent. Lengths are in tokens.

    Attributes:
        workload: One of WORKLOADS, or the name of ``asks``.
        data: The data set of sharegpt or jsonl.
        asks: The requests themselves, where they come from elsewhere.
        num_prompts: How many requests; of a data set at most so many.
        input_len: Most tokens of a random prompt.
        output_len: Tokens of an answer (of random ones: at most); None takes the data set's, or DEFAULT_OUTPUT.
        range_ratio: Least length of random prompts and answers, as a share of the most; at least 1.
        groups: How many groups of prompts begin alike; ``num_prompts`` is spread over them evenly.
        prefix_len: Tokens with which all of a group begin.
        suffix_len: Tokens of a prompt behind them.
        readable: Texts are words; otherwise whatever random tokens spell.
        text: Prompts of token ids are sent as the text that they spell.
        seed: Where the randomness comes from.
    """

    workload: str = "random"
    data: Path | None = None
    asks: tuple[SampleRequest, ...] | None = None
    num_prompts: int = 100
    input_len: int = 128
    output_len: int | None = None
    range_ratio: float = 0.0
    groups: int = 8
    prefix_len: int = 64
    suffix_len: int = 32
    readable: bool = False
    text: bool = False
    seed: int = 0

    @property
    def output(self) -> int:
        """Tokens of an answer, where no data set says how many."""
        return self.output_len or DEFAULT_OUTPUT

    def group_size(self) -> int:
        """Requests of each group.

        Raises:
            RequestError: There are fewer requests than groups.
        """
        if self.num_prompts < self.groups:
            raise RequestError(
                f"workload `{self.workload}`: expected at least {self.groups} requests, found {self.num_prompts}"
            )
        return self.num_prompts // self.groups


@dataclass(frozen=True)
class PromptLimits:
    """What a model takes: tokens of prompt and answer together, token ids below ``vocab_size``, and its tokenizer."""

    context: int
    vocab_size: int
    tokenizer: Tokenizer | None = None

    def need(self, workload: str) -> Tokenizer:
        """The tokenizer, which ``workload`` cannot do without.

        Raises:
            RequestError: There is none.
        """
        if self.tokenizer is None:
            raise RequestError(
                f"workload `{workload}`: expected a tokenizer, found none",
                "take --workload random or prefix-repetition, which send token ids",
            )
        return self.tokenizer

    def ids(self) -> list[int]:
        """Token ids that a random prompt may have: all that are not special."""
        special: frozenset[int] = frozenset() if self.tokenizer is None else self.tokenizer.special_ids
        found = [number for number in range(self.vocab_size) if number not in special]
        if not found:
            raise RequestError("workload: expected token ids that are not special, found none")
        return found

    def check_room(self, workload: str, prompt: int, output: int) -> None:
        """Refuses a prompt and an answer of so many tokens that have no room together."""
        if prompt + output > self.context:
            raise RequestError(
                f"workload `{workload}`: expected prompt and answer within the context of {self.context} tokens, "
                f"found {prompt} + {output} = {prompt + output}"
            )


def requests_of(spec: WorkloadSpec, limits: PromptLimits) -> list[SampleRequest]:
    """The requests of a workload.

    Raises:
        RequestError: They do not fit into the limits, a data set is missing or another one, or a tokenizer is missing.
    """
    asks = list(spec.asks[: spec.num_prompts]) if spec.asks is not None else WORKLOADS[spec.workload](spec, limits)
    if not spec.text:
        return asks
    spell = limits.need(spec.workload).decode
    return [ask if isinstance(ask.prompt, str) else replace(ask, prompt=spell(ask.prompt)) for ask in asks]


def sharegpt(spec: WorkloadSpec, limits: PromptLimits) -> list[SampleRequest]:
    """Conversations of a data set in ShareGPT's form: the first turn asks, and the second's length is the answer's.

    Conversations of one turn, those with fewer than two tokens in either, and those beyond the context are left out.
    """
    tokenizer = limits.need("sharegpt")
    if spec.output_len is not None and spec.output_len < LEAST_FIXED:
        raise RequestError(
            f"workload `sharegpt`: expected answers of {LEAST_FIXED} tokens or more, found {spec.output_len}"
        )
    dialogs = [turns for turns in map(turns_of, _data_of(spec)) if len(turns) >= 2]
    random.Random(spec.seed).shuffle(dialogs)
    asks: list[SampleRequest] = []
    for (_, first), (_, second), *_ in dialogs:
        if len(asks) == spec.num_prompts:
            break
        prompt, answer = len(tokenizer.encode(first)), len(tokenizer.encode(second, special=False))
        output = spec.output_len or answer
        if min(prompt, answer) >= SHORTEST and prompt + output <= limits.context:
            asks.append(SampleRequest(first, output))
    if not asks:
        raise RequestError(
            f"workload `{spec.data}`: expected conversations of two turns that fit into {limits.context} tokens, "
            "found none"
        )
    return asks


def random_ids(spec: WorkloadSpec, limits: PromptLimits) -> list[SampleRequest]:
    """Prompts of token ids that are neighbours: id (offset + request + place), special ones left out."""
    limits.check_room("random", spec.input_len, spec.output)
    rng, ids = random.Random(spec.seed), limits.ids()
    asks = []
    for number in range(spec.num_prompts):
        tokens, answer = (
            rng.randint(max(1, math.floor(most * spec.range_ratio)), most) for most in (spec.input_len, spec.output)
        )
        offset = rng.randrange(len(ids))
        prompt = tuple(ids[(offset + number + place) % len(ids)] for place in range(tokens))
        asks.append(SampleRequest(prompt, answer))
    return asks


def shared_prefix(spec: WorkloadSpec, limits: PromptLimits) -> list[SampleRequest]:
    """Groups of prompts that begin alike: a system text of the group, an empty line, and a question of its own."""
    tokenizer, each = limits.need("generated-shared-prefix"), spec.group_size()
    limits.check_room("generated-shared-prefix", spec.prefix_len + spec.suffix_len, spec.output)
    rng, ids, seen = random.Random(spec.seed), limits.ids(), set[str]()

    def another(tokens: int) -> str:
        for _ in range(100):
            # Tokenized again, what random tokens spell may have a few tokens more or fewer.
            found = _words(rng, tokenizer, tokens) if spec.readable else tokenizer.decode(rng.choices(ids, k=tokens))
            if found not in seen:
                seen.add(found)
                return found
        raise RequestError(
            f"workload `generated-shared-prefix`: expected texts of {tokens} tokens that differ, found too few"
        )

    asks = []
    for _ in range(spec.groups):
        start = another(spec.prefix_len) + "\n\n"
        asks += [SampleRequest(start + another(spec.suffix_len), spec.output) for _ in range(each)]
    rng.shuffle(asks)
    return asks


def prefix_repetition(spec: WorkloadSpec, limits: PromptLimits) -> list[SampleRequest]:
    """Token ids: a few prefixes, each with many suffixes, shuffled, as vLLM's data set of this name."""
    each = spec.group_size()
    limits.check_room("prefix-repetition", spec.prefix_len + spec.suffix_len, spec.output)
    rng, ids = random.Random(spec.seed), limits.ids()
    asks = []
    for _ in range(spec.groups):
        start = rng.choices(ids, k=spec.prefix_len)
        asks += [SampleRequest((*start, *rng.choices(ids, k=spec.suffix_len)), spec.output) for _ in range(each)]
    rng.shuffle(asks)
    return asks


def jsonl(spec: WorkloadSpec, _: PromptLimits) -> list[SampleRequest]:
    """The lines of a file, ``{"prompt": TEXT or [ID, …], "output_len": N, "timestamp": SECONDS}``, in their order.

    With timestamps on all lines the run sends each line so long after the first as they say.
    """
    asks = []
    for number, record in enumerate(itertools.islice(_data_of(spec), spec.num_prompts), 1):
        where = f"workload `{spec.data}` record {number}"
        prompt = record.get("prompt", record.get("prompt_ids"))
        if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
            prompt = tuple(prompt)
        output = spec.output_len or record.get("output_len")
        at = record.get("timestamp")
        if not prompt or not isinstance(prompt, (str, tuple)):
            raise RequestError(f"{where}: expected `prompt`, a text or token ids, found {str(prompt)[:60]}")
        if type(output) is not int or output < 1:
            hint = "say it for all with --output-len"
            raise RequestError(f"{where}: expected `output_len`, a whole number above 0, found {output}", hint)
        if at is not None and (isinstance(at, bool) or not isinstance(at, (int, float))):
            raise RequestError(f"{where}: expected `timestamp`, a number of seconds, found {str(at)[:60]}")
        asks.append(SampleRequest(prompt, output, at))
    timed = [ask.at for ask in asks if ask.at is not None]
    if timed and len(timed) != len(asks):
        raise RequestError(f"workload `{spec.data}`: expected a timestamp in all lines or in none, found {len(timed)}")
    if timed != sorted(timed):
        raise RequestError(f"workload `{spec.data}`: expected timestamps that ascend, found others")
    return [SampleRequest(ask.prompt, ask.output, None if ask.at is None else ask.at - timed[0]) for ask in asks]


WORKLOADS: Mapping[str, Callable[[WorkloadSpec, PromptLimits], list[SampleRequest]]] = {
    "random": random_ids,
    "sharegpt": sharegpt,
    "generated-shared-prefix": shared_prefix,
    "prefix-repetition": prefix_repetition,
    "jsonl": jsonl,
}


def arrivals(asks: Sequence[SampleRequest], rate: float, burstiness: float, seed: int) -> list[float]:
    """When each request is sent, in seconds after the run's start.

    A workload that says it itself is followed. An infinite rate sends all at once. Otherwise the gaps are drawn from a
    gamma distribution of the shape ``burstiness`` (1: exponential, a Poisson process), and all are scaled so that the
    last request is sent after N / rate seconds, as vLLM does it.

    Raises:
        RequestError: The workload says the times, and a rate is given, too.
    """
    if asks and asks[0].at is not None:
        if rate != math.inf:
            raise RequestError(f"request rate: expected none beside the workload's timestamps, found {rate:g}")
        return [ask.at or 0.0 for ask in asks]
    if rate == math.inf:
        return [0.0] * len(asks)
    rng = random.Random(seed)
    times = list(itertools.accumulate(rng.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in asks))
    scale = len(asks) / rate / times[-1] if times and times[-1] > 0 else 1.0
    return [at * scale for at in times]


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON list, or of JSON lines.

    Raises:
        RequestError: The file cannot be read, is empty, or has something else.
    """
    wanted = "a list of JSON objects, or one a line"
    try:
        with opened(path.parent, path.name) as file:
            data = file.read(LARGEST)
    except OSError as error:
        raise RequestError(f"data set `{path}`: expected a readable file, found {error.strerror}") from error
    start, where = data.lstrip()[:1], "the file"
    try:
        if start == b"[":
            records = parse_json(data, LARGEST)
        else:
            records = []
            for number, line in enumerate(data.split(b"\n"), 1):
                where = f"line {number}"
                if line.strip():
                    records.append(parse_json(line))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"data set `{path}`: expected {wanted}, found {error}, in {where}") from error
    if not records or not all(isinstance(record, dict) for record in records):
        raise RequestError(f"data set `{path}`: expected {wanted}, found {'others' if records else 'nothing'}")
    return list(records)


def _data_of(spec: WorkloadSpec) -> list[dict[str, Any]]:
    if spec.data is None:
        raise RequestError(f"workload `{spec.workload}`: expected a data set, found none", "name it: --data FILE")
    return read_records(spec.data)


def turns_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    """(who, what) of each turn of a conversation, in ShareGPT's form or in that of chats; none of another record."""
    lists = (record.get(name) for name in ("conversations", "conversation", "messages"))
    turns = [turn for turn in next((each for each in lists if isinstance(each, list)), []) if isinstance(turn, dict)]
    found = [(str(turn.get("from", turn.get("role"))), turn.get("value", turn.get("content"))) for turn in turns]
    return [(who, text) for who, text in found if isinstance(text, str)]


def _words(rng: random.Random, tokenizer: Tokenizer, tokens: int) -> str:
    """A text of words with at most so many tokens, and as many words as that allows."""
    words = rng.choices(WORDS, k=tokens)
    while len(words) > 1 and (found := len(tokenizer.encode(" ".join(words), special=False))) > tokens:
        words = words[: min(len(words) - 1, len(words) * tokens // found)]
    return " ".join(words)

"""What a run sends: prompts and lengths of answers, and when. The same seed gives the same requests, to the byte.

Nothing made here is kept between runs, so that no run can get what was made from another seed or tokenizer.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling3export.foundation.errors import RequestError
from ling3export.foundation.reading import opened
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.text.tokenizer import Tokenizer

WARM_UP = 32  # most tokens of the request that is sent before the clock runs
LARGEST = 4 << 30  # bytes of a data set
SHORTEST = 2  # tokens of a prompt and of an answer, below which sharegpt's conversations are left out
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


@dataclass(frozen=True)
class WorkloadSpec:
    """What workloads are made with.

    Attributes:
        count: How many requests; for a data set at most so many.
        context: Tokens of prompt and answer together.
        vocab_size: Token ids are below it.
        seed: Where the randomness comes from.
        tokenizer: Of the model; None where there is none.
        output: Tokens of every answer, where a data set's own lengths do not count.
    """

    count: int
    context: int
    vocab_size: int
    seed: int = 0
    tokenizer: Tokenizer | None = None
    output: int | None = None

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

    def fits(self, prompt: int, output: int) -> bool:
        """Whether a prompt and an answer of so many tokens have room together."""
        return prompt + output <= self.context


def sharegpt(spec: WorkloadSpec, path: Path) -> list[SampleRequest]:
    """Conversations of a data set in ShareGPT's form: the first turn asks, and the second's length is the answer's.

    Conversations of one turn, those with fewer than two tokens in either, and those beyond the context are left out.

    Raises:
        RequestError: The file is no such data set, or nothing of it is left.
    """
    tokenizer = spec.need("sharegpt")
    if spec.output is not None and spec.output < LEAST_FIXED:
        raise RequestError(
            f"workload `sharegpt`: expected answers of {LEAST_FIXED} tokens or more, found {spec.output}"
        )
    dialogs = [turns for turns in map(_turns, read_records(path)) if len(turns) >= 2]
    random.Random(spec.seed).shuffle(dialogs)
    asks: list[SampleRequest] = []
    for first, second, *_ in dialogs:
        if len(asks) == spec.count:
            break
        prompt, answer = len(tokenizer.encode(first)), len(tokenizer.encode(second, special=False))
        output = answer if spec.output is None else spec.output
        if min(prompt, answer) >= SHORTEST and spec.fits(prompt, output):
            asks.append(SampleRequest(first, output))
    if not asks:
        raise RequestError(
            f"workload `{path}`: expected conversations of two turns that fit into {spec.context} tokens, found none"
        )
    return asks


def random_ids(spec: WorkloadSpec, length: int, output: int, ratio: float) -> list[SampleRequest]:
    """Prompts of token ids that are neighbours: id (offset + request + place), special ones left out.

    Args:
        spec: What it is made with.
        length: Most tokens of a prompt.
        output: Most tokens of an answer.
        ratio: The least of either is this share of the most, and at least 1; lengths are uniform between.

    Raises:
        RequestError: The longest prompt and answer are beyond the context.
    """
    _check_room(spec, "random", length, output)
    rng, ids = random.Random(spec.seed), spec.ids()
    asks = []
    for number in range(spec.count):
        tokens, answer = (rng.randint(max(1, math.floor(most * ratio)), most) for most in (length, output))
        offset = rng.randrange(len(ids))
        prompt = tuple(ids[(offset + number + place) % len(ids)] for place in range(tokens))
        asks.append(SampleRequest(prompt, answer))
    return asks


def shared_prefix(
    spec: WorkloadSpec, groups: int, system: int, question: int, output: int, *, readable: bool = False
) -> list[SampleRequest]:
    """Groups of prompts that begin alike: a system text of the group, an empty line, and a question of its own.

    Args:
        spec: What it is made with; its ``count`` is spread over the groups evenly.
        groups: How many.
        system: Tokens of a system text.
        question: Tokens of a question.
        output: Tokens of an answer.
        readable: Texts are words; otherwise whatever random tokens spell.

    Raises:
        RequestError: There are fewer requests than groups, or they are beyond the context.
    """
    tokenizer = spec.need("generated-shared-prefix")
    each = _evenly(spec, "generated-shared-prefix", groups)
    _check_room(spec, "generated-shared-prefix", system + question, output)
    rng, seen = random.Random(spec.seed), set[str]()
    text = _words(rng, tokenizer) if readable else _spelled(rng, tokenizer, spec.ids())

    def another(tokens: int) -> str:
        for _ in range(100):
            if (found := text(tokens)) not in seen:
                seen.add(found)
                return found
        raise RequestError(
            f"workload `generated-shared-prefix`: expected texts of {tokens} tokens that differ, found too few"
        )

    asks = []
    for _ in range(groups):
        start = another(system) + "\n\n"
        asks += [SampleRequest(start + another(question), output) for _ in range(each)]
    rng.shuffle(asks)
    return asks


def prefix_repetition(spec: WorkloadSpec, prefixes: int, prefix: int, suffix: int, output: int) -> list[SampleRequest]:
    """Token ids: a few prefixes, each with many suffixes, shuffled, as vLLM's data set of this name.

    Raises:
        RequestError: There are fewer requests than prefixes, or they are beyond the context.
    """
    each = _evenly(spec, "prefix-repetition", prefixes)
    _check_room(spec, "prefix-repetition", prefix + suffix, output)
    rng, ids = random.Random(spec.seed), spec.ids()
    asks = []
    for _ in range(prefixes):
        start = rng.choices(ids, k=prefix)
        asks += [SampleRequest((*start, *rng.choices(ids, k=suffix)), output) for _ in range(each)]
    rng.shuffle(asks)
    return asks


def jsonl(spec: WorkloadSpec, path: Path) -> list[SampleRequest]:
    """The lines of a file, ``{"prompt": TEXT or [ID, …], "output_len": N, "timestamp": SECONDS}``, in their order.

    With timestamps on all lines the run sends each line so long after the first as they say.

    Raises:
        RequestError: A line is something else.
    """
    asks = []
    for number, record in enumerate(itertools.islice(read_records(path), spec.count), 1):
        where = f"workload `{path}` record {number}"
        prompt = record.get("prompt", record.get("prompt_ids"))
        if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
            prompt = tuple(prompt)
        output = spec.output or record.get("output_len")
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
        raise RequestError(f"workload `{path}`: expected a timestamp in all lines or in none, found {len(timed)}")
    if timed != sorted(timed):
        raise RequestError(f"workload `{path}`: expected timestamps that ascend, found others")
    return [SampleRequest(ask.prompt, ask.output, None if ask.at is None else ask.at - timed[0]) for ask in asks]


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


def _turns(record: dict[str, Any]) -> list[str]:
    """The texts of a conversation, in ShareGPT's form or in that of chats."""
    turns = record.get("conversations", record.get("conversation", record.get("messages")))
    if not isinstance(turns, list):
        return []
    texts = [turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns]
    return [text for text in texts if isinstance(text, str)]


def _evenly(spec: WorkloadSpec, workload: str, groups: int) -> int:
    if spec.count < groups:
        raise RequestError(f"workload `{workload}`: expected at least {groups} requests, found {spec.count}")
    return spec.count // groups


def _check_room(spec: WorkloadSpec, workload: str, prompt: int, output: int) -> None:
    if not spec.fits(prompt, output):
        raise RequestError(
            f"workload `{workload}`: expected prompt and answer within the context of {spec.context} tokens, found "
            f"{prompt} + {output} = {prompt + output}"
        )


def _words(rng: random.Random, tokenizer: Tokenizer) -> Callable[[int], str]:
    """Makes texts of words with at most so many tokens, and as many words as that allows."""

    def text(tokens: int) -> str:
        words = rng.choices(WORDS, k=tokens)
        while len(words) > 1 and (found := len(tokenizer.encode(" ".join(words), special=False))) > tokens:
            words = words[: min(len(words) - 1, len(words) * tokens // found)]
        return " ".join(words)

    return text


def _spelled(rng: random.Random, tokenizer: Tokenizer, ids: Sequence[int]) -> Callable[[int], str]:
    """Makes texts that random tokens spell; tokenized again, they may have a few tokens more or fewer."""
    return lambda tokens: tokenizer.decode(rng.choices(ids, k=tokens))

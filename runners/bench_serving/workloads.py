"""The requests of a run: prompts, lengths of answers, and times. The same seed gives the same requests, to the byte."""

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ling3export.foundation.errors import RequestError
from ling3export.foundation.reading import opened
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.text.vocabulary import Tokenizer

LARGEST = 4 << 30  # bytes of a data set
DEFAULT_OUTPUT = 64  # tokens of an answer


@dataclass(frozen=True)
class SampleRequest:
    """A request of a workload: a text or token ids, and the most tokens of the answer."""

    prompt: str | tuple[int, ...]
    output: int


@dataclass(frozen=True, kw_only=True)
class WorkloadSpec:
    """The workload. Lengths are in tokens.

    Attributes:
        workload: One of WORKLOADS, or the name of ``requests``.
        requests: The requests themselves, if they come from elsewhere; None makes those of ``workload``.
        input_len: Most tokens of a random prompt.
        output_len: Tokens of an answer (of random ones: at most); None takes the data set's, or DEFAULT_OUTPUT.
        range_ratio: Least length of random prompts and answers, as a share of the most; at least 1.
        groups: Groups of prompts that share a prefix; ``num_prompts`` is spread over them evenly.
        prefix_len: Tokens that the prompts of a group share.
        suffix_len: Tokens of a prompt after its prefix.
        text: Send prompts of token ids as the text that they spell.
    """

    workload: str = "random"
    data: Path | None = None
    requests: tuple[SampleRequest, ...] | None = None
    num_prompts: int = 100
    input_len: int = 128
    output_len: int | None = None
    range_ratio: float = 0.0
    groups: int = 8
    prefix_len: int = 64
    suffix_len: int = 32
    text: bool = False
    seed: int = 0

    @property
    def output(self) -> int:
        """Tokens of an answer, if no data set sets them."""
        return self.output_len or DEFAULT_OUTPUT


@dataclass(frozen=True)
class PromptLimits:
    """The bounds of a model: tokens of prompt and answer together, token ids below ``vocab_size``, its tokenizer."""

    context: int
    vocab_size: int
    tokenizer: Tokenizer | None = None

    def ids(self) -> list[int]:
        """Token ids that a random prompt may have: all that are not special."""
        special: frozenset[int] = frozenset() if self.tokenizer is None else self.tokenizer.special_ids
        ids = [number for number in range(self.vocab_size) if number not in special]
        if not ids:
            raise RequestError("workload: all token ids are special")
        return ids

    def check_room(self, spec: WorkloadSpec, prompt: int) -> None:
        """Refuses prompts and answers that have no room together."""
        if prompt + spec.output > self.context:
            raise RequestError(
                f"workload `{spec.workload}`: expected prompt and answer within the context of {self.context} tokens, "
                f"found {prompt} + {spec.output} = {prompt + spec.output}"
            )


def requests_of(spec: WorkloadSpec, limits: PromptLimits) -> list[SampleRequest]:
    """The requests of a workload.

    Raises:
        RequestError: They exceed the limits, or the data set or the tokenizer is missing or wrong.
    """
    if spec.requests is not None:
        requests = list(spec.requests[: spec.num_prompts])
    else:
        requests = WORKLOADS[spec.workload](spec, limits)
    if not spec.text:
        return requests
    if limits.tokenizer is None:
        raise RequestError("--text: there is no tokenizer", "name one: --tokenizer FILE")
    spell = limits.tokenizer.decode
    return [
        request if isinstance(request.prompt, str) else replace(request, prompt=spell(request.prompt))
        for request in requests
    ]


def random_ids(spec: WorkloadSpec, limits: PromptLimits) -> list[SampleRequest]:
    """Prompts of neighbouring token ids, id (offset + request + place), without special ones."""
    limits.check_room(spec, spec.input_len)
    rng, ids = random.Random(spec.seed), limits.ids()
    requests = []
    for number in range(spec.num_prompts):
        tokens, answer = (
            rng.randint(max(1, math.floor(most * spec.range_ratio)), most) for most in (spec.input_len, spec.output)
        )
        offset = rng.randrange(len(ids))
        prompt = tuple(ids[(offset + number + place) % len(ids)] for place in range(tokens))
        requests.append(SampleRequest(prompt, answer))
    return requests


def shared_prefix(spec: WorkloadSpec, limits: PromptLimits) -> list[SampleRequest]:
    """A few prefixes of random token ids, each with many suffixes, shuffled; vLLM calls it prefix_repetition."""
    if spec.num_prompts < spec.groups:
        raise RequestError(f"workload `shared-prefix`: expected at least {spec.groups} requests for as many groups")
    limits.check_room(spec, spec.prefix_len + spec.suffix_len)
    rng, ids = random.Random(spec.seed), limits.ids()
    prompts = []
    for _ in range(spec.groups):
        prefix = rng.choices(ids, k=spec.prefix_len)
        size = spec.num_prompts // spec.groups
        prompts += [(*prefix, *rng.choices(ids, k=spec.suffix_len)) for _ in range(size)]
    rng.shuffle(prompts)
    return [SampleRequest(prompt, spec.output) for prompt in prompts]


def jsonl(spec: WorkloadSpec, _: PromptLimits) -> list[SampleRequest]:
    """The lines of a file, ``{"prompt": TEXT or [ID, …], "output_len": N}``, in their order."""
    if spec.data is None:
        raise RequestError("workload `jsonl`: name the data set", "--data FILE")
    requests = []
    for number, record in enumerate(read_records(spec.data)[: spec.num_prompts], 1):
        where = f"workload `{spec.data}` record {number}"
        prompt, output = record.get("prompt"), spec.output_len or record.get("output_len")
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            prompt = tuple(prompt)
        if not prompt or not isinstance(prompt, (str, tuple)):
            raise RequestError(f"{where}: expected `prompt`, a text or token ids, found {str(prompt)[:60]}")
        if type(output) is not int or output < 1:
            hint = "set it for all: --output-len"
            raise RequestError(f"{where}: expected `output_len`, a whole number above 0, found {output}", hint)
        requests.append(SampleRequest(prompt, output))
    return requests


WORKLOADS: Mapping[str, Callable[[WorkloadSpec, PromptLimits], list[SampleRequest]]] = {
    "random": random_ids,
    "shared-prefix": shared_prefix,
    "jsonl": jsonl,
}


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When each of ``count`` requests is sent, in seconds after the run's start.

    An infinite rate sends all at once. Otherwise arrivals are a Poisson process. It is scaled as vLLM does it: the last
    request is sent after ``count`` / ``rate`` seconds.
    """
    if rate == math.inf:
        return [0.0] * count
    rng = random.Random(seed)
    times = list(itertools.accumulate(rng.expovariate(rate) for _ in range(count)))
    return [time * count / rate / times[-1] for time in times]


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
    where, records = "the file", []
    try:
        if data.lstrip()[:1] == b"[":
            records = parse_json(data, LARGEST)
        else:
            for number, line in enumerate(data.split(b"\n"), 1):
                where = f"line {number}"
                if line.strip():
                    records.append(parse_json(line))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"data set `{path}`: expected {wanted}, found {error}, in {where}") from error
    if not records or not all(isinstance(record, dict) for record in records):
        raise RequestError(f"data set `{path}`: expected {wanted}, found {'others' if records else 'nothing'}")
    return list(records)

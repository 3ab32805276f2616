"""Damaged input of the runner: prompt files for a running engine, folders of evaluations, and task files."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from ling3export.foundation.errors import Ling3Error
from ling3export.runners.cli.generate import line_names, read_prompts
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.evals import compare, report, run_file, task_files
from ling3export.runners.evals.run import run_suite
from ling3export.runners.evals.suites import Suite
from ling3export.runners.evals.trials import RunConfig
from ling3export.runners.text.grammar import Grammar
from tests.fuzz.artifact_cases import toy_copy
from tests.fuzz.harness import Case, WrongResultError
from tests.fuzz.mutations import json_text, mutated, mutated_bytes
from tests.support.eval_fakes import FakeBackend, half, numbered

LINES = (
    {"prompt_ids": [1, 2, 3]},
    {"prompt": "How many apples"},
    {"prompt_ids": [300]},
    {"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]},
)


@contextmanager
def prompts(folder: Path) -> Iterator[Case]:
    """A prompt file is read and completed; the engine has to stay alive."""
    toy, path = toy_copy(folder), folder / "prompts.jsonl"
    from ling3export.runners.engine.engine import Engine
    from tests.support.toy_artifact import answer

    with Engine(toy, report=lambda text: None) as engine:

        def case(rng: Random) -> None:
            lines = [json_text(each) for each in rng.sample(LINES, 3)]
            lines[rng.randrange(3)] = json_text(mutated(rng, rng.choice(LINES), 2))
            data = rng.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(lines)
            path.write_bytes(mutated_bytes(rng, data) if rng.random() < 0.2 else data)
            try:
                look()
            finally:
                if engine.stopped is not None:
                    raise WrongResultError(f"the engine ended: {engine.stopped}")

        def look() -> None:
            found = read_prompts(path)
            names = line_names(path, len(found))
            for done in engine.generate(found, max_tokens=2, ignore_eos=True, names=names):
                if done.token_ids != answer(done.prompt_ids, len(done.token_ids))[0]:
                    raise WrongResultError(f"silently different tokens: {done}")

        path.write_bytes(b"\n".join(map(json_text, LINES)))
        look()
        yield case


# around the sizes at which buffers grow and pages fill
SIZES = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 320)
GRAMMARS = (
    Grammar("regex", "[a-z ]{1,40}"),
    Grammar("json", '{"type": "array", "items": {"type": "integer"}}'),
    Grammar("lark", 'start: "yes" | "no" | /[0-9]+/'),
    Grammar("regex", ".{0,8}", behind="e"),  # the mark must come first
)
TOGETHER = 8  # requests of a case, without the choices of one of them
CHOICES = (1,) * 12 + (2, 16, 128)


@contextmanager
def together(folder: Path) -> Iterator[Case]:
    """Runs requests with all settings and sizes up to every limit together; tokens must be those of each request alone.

    A case has some 17 requests, so the 180 cases of ``make test`` compare 3,000. This command compares 20,000:

        make fuzz ARGS="--target together --cases 1200"

    Greedy choices of a request differ only in their seeds, on which no token depends. So one of them is run alone for
    all.
    """
    toy = toy_copy(folder)
    from ling3export.runners.engine.engine import Engine

    with Engine(toy, report=lambda text: None) as engine:

        def case(rng: Random) -> None:
            asked = [request_at_random(rng, engine.limits.context, engine.limits.vocab_size) for _ in range(TOGETHER)]
            first, count = asked[0], rng.choice(CHOICES)
            if count > 16:  # long answers, each run once more alone, would exceed the time of a case
                asked[0] = first = replace(first, max_tokens=min(first.max_tokens, 16))
            asked += [first.sampled(replace(first.sampling, seed=choice)) for choice in range(1, count)]
            try:
                found = engine.complete(asked)
                single = asked if first.sampling.temperature else asked[:TOGETHER]
                alone = [engine.complete([each])[0] for each in single]
                alone += alone[:1] * (len(asked) - len(alone))
                for request, done, other in zip(asked, found, alone, strict=True):
                    both = [(each.token_ids, each.text, each.stop_reason) for each in (done, other)]
                    if both[0] != both[1] or (done.logprobs or ()) != (other.logprobs or ()):
                        raise WrongResultError(f"not as alone: {request}: {done}, and {other}")
            finally:
                stats = engine.stats()
                if engine.stopped is not None or stats["live"] or stats["free"] != stats["pools"]:
                    raise WrongResultError(f"the engine ended, or keeps what it lent: {engine.stopped}, {stats}")

        yield case


def request_at_random(rng: Random, context: int, vocab: int) -> Request:
    """A request whose prompt and answer may fill the context, with any of the settings."""
    size = rng.choice((1, 2, 15, 16, 17, 31, 32, 33, context - 2, context - 1, rng.randrange(1, context)))
    biased = min(rng.choice((0, 0, *SIZES)), vocab)
    often = rng.random() < 0.5
    sampling = Sampling(
        rng.choice((0.0, 0.0, 0.7, 2.0)),
        rng.choice((0, 1, 40, 2**31 - 1)),
        rng.choice((1.0, 0.9, 1e-9)),
        rng.randrange(2**32),
        rng.choice((0.0, -2.0, 2.0)) if often else 0.0,
        rng.choice((0.0, -2.0, 2.0)) if often else 0.0,
        rng.choice((1.0, 0.5, 1.1, 10.0)) if often else 1.0,
        tuple((token, rng.uniform(-100, 100)) for token in rng.sample(range(vocab), biased)),
        rng.choice((0.0, 0.0, 1e-9, 0.1, 1.0)),
    )
    most = rng.choice((1, 1, 2, 2, 4, 8, 16, context - size, 2**31 - 1))
    return Request(
        tuple(rng.randrange(vocab) for _ in range(size)),
        most,
        sampling,
        tuple("".join(rng.choices("abc \u00e9", k=rng.choice((1, 3, 1000)))) for _ in range(rng.choice((0, 0, 1, 16)))),
        ignore_eos=rng.random() < 0.5,
        name=f"of {size}",
        cache_salt=rng.choice(("", "other")),
        logprobs=rng.choice((None, None, 0, 1, 20)),
        grammar=rng.choice((*[None] * 12, *GRAMMARS)),
        stop_token_ids=tuple(rng.randrange(vocab) for _ in range(rng.choice((0, 0, 1, 16)))),
        include_stop_str_in_output=rng.random() < 0.5,
        skip_special_tokens=rng.random() < 0.5,
        min_tokens=rng.choice((0, 0, 1, min(most, rng.randrange(context)))),
        priority=rng.choice((0, 0, -1, 7)),
    )


@contextmanager
def evaluations(folder: Path) -> Iterator[Case]:
    """A run's file, finished or not, is read, reported, compared and continued."""
    suite, config = Suite("s", numbered(4)), RunConfig(batch=2)
    whole, copy = folder / "whole", folder / "copy"
    run_suite(suite, FakeBackend(half), whole, config)
    finished = whole.read_bytes()
    begun = b"".join(finished.splitlines(keepends=True)[:7]) + b'{"kind": "trial", "idx": 2, "ta'

    def case(rng: Random) -> None:
        copy.write_bytes(_damaged(rng, rng.choice((finished, begun))))
        refusals = []
        for look in (reported, compared, resumed):
            try:
                look()
            except Ling3Error as error:
                refusals.append(error)
        if refusals:
            raise refusals[0]

    def reported() -> None:
        report.report(run_file.read_run(copy))

    def compared() -> None:
        compare.diff(whole, copy)
        compare.diff(copy, whole)

    def resumed() -> None:
        done = run_suite(suite, FakeBackend(half), copy, config).summary
        if done.total != 4:
            raise WrongResultError(f"{done.total} trials of 4")

    yield case


@contextmanager
def tasks(folder: Path) -> Iterator[Case]:
    """A task file, JSON or YAML, is read, and its tasks are checked."""
    made = folder / "made.json"
    task = {
        "id": "made",
        "input": {"prompt": "Question: How many legs do 3 cats have?\nAnswer:"},
        "target": "12",
        "graders": ["last_numeric"],
        "grading": {"threshold": 1.0},
        "reference_solution": "3 cats have 3 * 4 = 12 legs.",
    }
    made.write_text(json.dumps({"task": task}))
    problem = {"question": "2 + 3?", "answer": 5}
    kinds = {"choices": ["a", "b"], "target": "A", "graders": [{"type": "choice"}], "threshold": 1}

    def case(rng: Random) -> None:
        tree = rng.choice(
            (
                {"task": task},
                {"tasks": [task, {**task, "id": "b"}]},
                [problem, problem],
                {"data": [problem]},
                {"task": task | kinds},
            )
        )
        path = folder / rng.choice(("t.json", "t.yaml"))
        data = json_text(mutated(rng, tree), rng.choice((None, 1)))
        path.write_bytes(mutated_bytes(rng, data) if rng.random() < 0.3 else data)
        look(path)

    def look(path: Path) -> None:
        task_files.check_tasks(task_files.load_tasks(path))

    look(made)
    yield case


def _damaged(rng: Random, data: bytes) -> bytes:
    """Damages a line of JSON, as a tree or as bytes."""
    if rng.random() < 0.2:
        return mutated_bytes(rng, data)
    parts = data.split(b"\n")
    at = rng.randrange(max(1, len(parts) - 1))
    try:
        parts[at] = json_text(mutated(rng, json.loads(parts[at])))
    except ValueError:
        return mutated_bytes(rng, data)
    return b"\n".join(parts)

"""The engine's receipt: a few prompts through the whole engine, judged by the numpy reference.

Vectors run single calls with slots and pages by hand. The engine adds a scheduler, batches, prefill in parts, a prefix
cache and states that move. So its answers are compared, too. The reference computes the logits at every token of the
engine's own answers: two tokens that rounding may swap change one token, and all later ones are still judged. That is
why nothing is kept in the artifact.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ling3export.artifacts.schema import Manifest, Target
from ling3export.artifacts.signing import read_trusted
from ling3export.foundation.phases import MOVING
from ling3export.foundation.processes import Child, answer, replied
from ling3export.plan.recorded import config_of
from ling3export.verify.stored import stored_reference

if TYPE_CHECKING:
    from ling3export.runners.engine.engine import Engine
    from ling3export.runners.engine.request import Completion

MODULE = "ling3export.verify.engine"
DEFAULT_BYTES = 10**8  # of weights: the reference reads all of them, in numpy
ANSWER = 6  # tokens of each answer
AWAY = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


@dataclass(frozen=True)
class EngineReceipt:
    """Results of the engine's answers.

    Attributes:
        prompts: How many prompts ran together.
        tokens: How many tokens were compared.
        other: Tokens that are not the reference's best; rounding may swap near ones.
        relative: Relative L2 distance of a token's logits from the reference's, the largest.
        median: The median of that.
        tolerance: The bound of ``relative`` in fp32, of ``median`` in bf16.
        measure: Which of both: ``largest`` or ``median``.
        wrong: Tokens that are not the best of the engine's own logits, or differ when the same prompt comes again.
        cached: Prompt tokens that the prefix cache gave when the prompts came again.
        moved: Prompts whose state left the engine after prefill and came back for decode.
    """

    prompts: int
    tokens: int
    other: int
    relative: float
    median: float
    tolerance: float
    measure: str
    wrong: int
    cached: int
    moved: int

    @property
    def passed(self) -> bool:
        """Whether the errors are within the tolerance, and no token is wrong."""
        judged = self.relative if self.measure == "largest" else self.median
        return judged <= self.tolerance and not self.wrong

    def lines(self) -> list[str]:
        """For a person."""
        judged = self.relative if self.measure == "largest" else self.median
        return [
            f"engine: {'passed' if self.passed else 'failed'}: {self.prompts} prompts, {self.tokens} tokens, "
            f"{self.measure} error {judged:.1e}, tolerance {self.tolerance:.1e}; {self.wrong} wrong tokens; "
            f"the reference's best is another in {self.other}",
            f"came again: {self.cached} prompt tokens from the prefix cache; {self.moved} states moved from prefill "
            "to decode",
        ]


def prompts_of(manifest: Manifest, target: Target) -> list[tuple[int, ...]]:
    """Seeded prompts: of one token, within and across chunks, and longer than the largest padding where that fits.

    They leave room for the answers, and two of them begin alike.
    """
    state = target.state
    room = min(manifest.plan.context, state.pages * state.page_size // 2) - ANSWER
    largest = max(target.paddings("prefill"))
    rng = np.random.default_rng(0)
    lengths = [min(length, room) for length in (1, state.chunk + 3, 3 * state.chunk, largest + state.chunk + 5)]
    prompts = [tuple(int(token) for token in rng.integers(0, manifest.vocab_size, length)) for length in lengths]
    return [*prompts, (*prompts[-1][: lengths[-1] // 2], *prompts[1])][: max(2, min(5, state.slots + 1))]


def answers(
    engine: "Engine", prompts: list[tuple[int, ...]], *, moves: bool
) -> tuple[list["Completion"], int, int, int]:
    """Runs the prompts together, then again, then with a state that leaves and comes back.

    Returns:
        The completions of the first time, with their logits; wrong tokens; cached tokens; moved states.
    """
    from ling3export.runners.engine.request import Request

    requests = [Request(prompt, ANSWER, ignore_eos=True, logits=True) for prompt in prompts]
    first = engine.complete(requests)
    wrong = sum(
        token != int(np.argmax(row))
        for done in first
        if done.logits is not None
        for token, row in zip(done.token_ids, done.logits, strict=True)
    )

    def differing(others: list["Completion"]) -> int:
        pairs = [(one.token_ids, other.token_ids) for one, other in zip(first, others, strict=True)]
        return sum(
            sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other)) for one, other in pairs
        )

    again = engine.complete([replace(request, logits=False) for request in requests])
    cached, moved = sum(done.cached_tokens for done in again), 0
    wrong += differing(again)
    if moves:
        salted = [replace(request, logits=False, cache_salt="moved") for request in requests]
        away = [replace(request, max_tokens=1, kv_transfer_params=AWAY) for request in salted]
        left = engine.complete(away)
        back = [
            replace(request, kv_transfer_params=done.kv_transfer_params)
            for request, done in zip(salted, left, strict=True)
        ]
        returned = engine.complete(back)
        moved = sum(done.kv_transfer_params is not None for done in left)
        wrong += differing(returned) + len(prompts) - moved
    return first, wrong, cached, moved


def judged(
    manifest: Manifest, folder: Path, prompts: list[tuple[int, ...]], completions: list["Completion"]
) -> tuple[list[float], int]:
    """Relative errors of the logits of every token, and in how many the reference's best token is another one."""
    from ling3export.runners.calibrate.receipts import relative_error

    reference = stored_reference(folder, manifest.weights, config_of(manifest), manifest.plan)
    whole = [(*prompt, *done.token_ids[:-1]) for prompt, done in zip(prompts, completions, strict=True)]
    places = [range(len(prompt) - 1, len(ids)) for prompt, ids in zip(prompts, whole, strict=True)]
    wanted = reference.logits_many(whole, places)
    errors, other = [], 0
    for done, rows in zip(completions, wanted, strict=True):
        assert done.logits is not None
        for token, actual, row in zip(done.token_ids, done.logits, rows, strict=True):
            errors.append(relative_error(actual, row))
            other += token != int(np.argmax(row))
    return errors, other


def engine_receipt(folder: Path, name: str) -> EngineReceipt:
    """Runs the prompts through an engine in this process, with one target's executables."""
    from ling3export.runners.calibrate.receipts import TOLERANCES
    from ling3export.runners.engine.engine import Engine
    from ling3export.runners.transfer.options import Transfer

    manifest = read_trusted(folder, lambda _: None)
    target = manifest.targets[name]
    prompts, tolerance = prompts_of(manifest, target), TOLERANCES[manifest.plan.dtype]
    moves = all(target.paddings(phase) for phase in MOVING)
    with tempfile.TemporaryDirectory(prefix="ling3-states-") as states:
        settings: dict[str, Any] = {"transfer": Transfer("file", folder=Path(states, "states"))} if moves else {}
        with Engine(folder, target=name, report=lambda _: None, **settings) as engine:
            completions, wrong, cached, moved = answers(engine, prompts, moves=moves)
    errors, other = judged(manifest, folder, prompts, completions)
    return EngineReceipt(
        prompts=len(prompts),
        tokens=len(errors),
        other=other,
        relative=max(errors),
        median=float(np.median(errors)),
        tolerance=tolerance.bound,
        measure=tolerance.measure,
        wrong=wrong,
        cached=cached,
        moved=moved,
    )


def engine_apart(folder: Path, name: str) -> EngineReceipt:
    """:func:`engine_receipt` in a fresh process.

    Raises:
        ArtifactError: The engine did not run.
    """
    with Child(MODULE) as child:
        child.send({"artifact": str(folder), "target": name})
        return EngineReceipt(**replied(child, f"the engine did not run {name} of {folder.name}"))


def engine_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Measures the engine for the process that started this one."""
    return asdict(engine_receipt(Path(job["artifact"]), job["target"]))


if __name__ == "__main__":
    answer(engine_job)

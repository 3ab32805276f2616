"""What drives a loaded artifact: its scheduler, behind the turns that every host takes alike."""

from collections.abc import Callable
from dataclasses import dataclass

from ling3export.runners.engine.block_manager import Allocator
from ling3export.runners.engine.counters import Counters
from ling3export.runners.engine.engine_step import Arrival, Turns
from ling3export.runners.engine.follower import SharedTurns
from ling3export.runners.engine.inputs import Shapes
from ling3export.runners.engine.request import Limits
from ling3export.runners.engine.scheduler import Scheduler
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.load.loader import Loaded
from ling3export.runners.text.tokenizer import TokenizerFiles


@dataclass(frozen=True)
class Driving:
    """The parts of an engine that every host has.

    Attributes:
        files: The tokenizer and the chat template.
        allocator: Slots and pages.
        limits: What one request may ask for.
        counters: The scheduler's.
        turns: What to do, turn by turn; host 0 of several tells the others.
    """

    files: TokenizerFiles
    allocator: Allocator
    limits: Limits
    counters: Counters
    turns: Turns


def driving(loaded: Loaded, *, overlap: bool) -> Driving:
    """The parts for a loaded artifact.

    Args:
        loaded: It.
        overlap: Dispatch the next step before the tokens of the last one are read.
    """
    files = TokenizerFiles(loaded.folder, loaded.manifest)
    record, plan = loaded.record, loaded.manifest["plan"]
    state, allocator = record["state"], Allocator.of(record)
    limits = Limits(
        min(plan["context"], state["max_pages"] * state["page_size"]), loaded.manifest["config"]["vocab_size"],
        allocator.longest, state["page_size"],
    )  # fmt: skip
    scheduler = Scheduler(loaded.device, Shapes.of(record), allocator, ahead=1 if overlap else 0)
    sequence, channel = sequences(limits, files), loaded.channel
    turns = SharedTurns(scheduler, sequence, channel) if channel else Turns(scheduler, sequence)
    return Driving(files, allocator, limits, scheduler.counters, turns)


def sequences(limits: Limits, files: TokenizerFiles) -> Callable[[Arrival], Sequence]:
    """What makes a sequence of an arrival. It knows no engine, so that its thread keeps none alive."""
    eos = files.eos_token_ids()
    tokenizer = files.tokenizer("text out") if files.there else None

    def sequence(arrival: Arrival) -> Sequence:
        number, request, at = arrival
        stream = tokenizer.stream(request.stop) if tokenizer else None
        return Sequence(request, number, limits.answer(request), eos, stream, at)

    return sequence

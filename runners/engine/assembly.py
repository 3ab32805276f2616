"""What the engine of every host consists of, made from an artifact. Imports numpy only once the environment is set."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.runners.engine.request import Limits
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.load.loader import Loaded, load
from ling3export.runners.text.tokenizer import TokenizerFiles

if TYPE_CHECKING:
    from ling3export.runners.engine.block_manager import BlockManager
    from ling3export.runners.engine.core import Arrival, EngineCore
    from ling3export.runners.engine.counters import Counters
    from ling3export.runners.engine.sequence import Sequence


@dataclass(frozen=True)
class Parts:
    """The parts of an engine, on every host alike.

    Attributes:
        loaded: The artifact: programs, weights and state on the devices.
        files: The tokenizer and the chat template.
        limits: What one request may ask for.
        blocks: Slots and pages.
        counters: What the scheduler counts.
        core: Takes the steps; host 0 of several tells the others.
    """

    loaded: Loaded
    files: TokenizerFiles
    limits: Limits
    blocks: "BlockManager"
    counters: "Counters"
    core: "EngineCore"


def load_parts(
    artifact: str | Path, *, target: str | None, programs: str, check: str, overlap: bool, hosts: Hosts | None,
    report: Callable[[str], None],
) -> Parts:  # fmt: skip
    """Loads an artifact and assembles its engine. Several hosts load the same artifact with equal ``overlap``.

    Args:
        artifact: Its folder.
        target: Which target; None takes the only one that fits this machine.
        programs: ``prebuilt-only``, or ``allow-compile``.
        check: ``all``, or ``programs``: weights are used without checking their digests.
        overlap: Dispatch the next step before the tokens of the last one are read.
        hosts: This process's place where several run together.
        report: Told what was chosen and why.

    Raises:
        ArtifactError, HostsError, Ling3Error: The artifact cannot be loaded here (``load``).
    """
    loaded = load(
        artifact, target=target, programs=programs, check=check, report=report, hosts=hosts,
        agreed={"overlap": overlap},
    )  # fmt: skip
    # numpy comes with these.
    from ling3export.runners.engine.block_manager import BlockManager
    from ling3export.runners.engine.core import EngineCore, SharedCore
    from ling3export.runners.engine.inputs import Shapes
    from ling3export.runners.engine.scheduler import Scheduler

    files = TokenizerFiles(loaded.folder, loaded.manifest.tokenizer, loaded.manifest.eos_token_ids)
    manifest, record = loaded.manifest, loaded.record
    state, blocks = record.state, BlockManager.of(record)
    limits = Limits(manifest.plan.context, manifest.vocab_size, state.pages, state.page_size)
    scheduler = Scheduler(loaded.runner, Shapes.of(record), blocks, ahead=1 if overlap else 0)
    sequence, channel = _sequences(limits, files), loaded.channel
    core = SharedCore(scheduler, sequence, channel) if channel else EngineCore(scheduler, sequence)
    return Parts(loaded, files, limits, blocks, scheduler.counters, core)


def _sequences(limits: Limits, files: TokenizerFiles) -> "Callable[[Arrival], Sequence]":
    """What makes a sequence of an arrival. It knows no engine, so that the engine's thread keeps none alive."""
    from ling3export.runners.engine.sequence import Sequence

    eos = files.eos_token_ids()
    tokenizer = files.tokenizer("text out") if files.there else None

    def sequence(arrival: "Arrival") -> Sequence:
        number, request, at = arrival
        stream = tokenizer.stream(request.stop) if tokenizer else None
        return Sequence(request, number, limits.answer(request), eos, stream, at)

    return sequence

"""What is to be built: paddings, parallelism, targets and pool sizes, checked before any work is done."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ling3export.errors import PlanError
from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.plan.pools import size_pages
from ling3export.plan.targets import DEFAULT_CPU_TP, GIB, Target, parse_target


@dataclass(frozen=True)
class Options:
    """The knobs of ``ling3export build``; the one place where their defaults live.

    Attributes:
        paddings: Token slots of the prefill programs: ascending multiples of 16.
        decode_paddings: Sequences of the decode programs; None derives them from ``paddings``.
        score_paddings: Token slots of the score programs; none without.
        tp: Devices that share the model on cpu; None is 16, or all slabs of a model that has fewer.
        targets: ``PLATFORM[:KIND][:TOPOLOGY][@TP]``.
        max_running: Sequences that hold state at once.
        page_size: Tokens a latent page.
        context: Longest sequence; None is 8192 or the model's limit, whichever is less.
        memory_fraction: Of an accelerator's memory, what weights and pools may take.
        state_memory: Bytes for the state of all virtual devices of a cpu target together.
        pages: Latent pages; None takes what fits, at most what ``max_running`` full sequences need.
        dtype: ``bfloat16`` or ``float32`` (highest matmul precision throughout).
        jobs: Cells compiled at a time; None is one a core.
    """

    paddings: tuple[int, ...] = (16, 128, 512)
    decode_paddings: tuple[int, ...] | None = None
    score_paddings: tuple[int, ...] = ()
    tp: int | None = None
    targets: tuple[str, ...] = ("cpu",)
    max_running: int = 64
    page_size: int = 256
    context: int | None = None
    memory_fraction: float = 0.6
    state_memory: int = 4 * GIB
    pages: int | None = None
    dtype: str = "bfloat16"
    jobs: int | None = None


DEFAULT_CONTEXT = 8192
LARGEST_PADDING = 2**20  # int32 offsets hold every field of a step up to here


@dataclass(frozen=True)
class Cell:
    """One program: a phase at a padding (token slots, sequences or rows)."""

    phase: str
    padding: int

    @property
    def name(self) -> str:
        """``prefill@512`` and its like."""
        return f"{self.phase}@{self.padding}"


@dataclass(frozen=True)
class Plan:
    """A checked plan for one target.

    Attributes:
        target: The machine.
        geometry: What its programs are compiled for.
        paddings: Prefill's.
        decode_paddings: Decode's.
        context: Longest sequence in tokens.
        notes: Lines for the user: what was chosen, and why.
        score_paddings: Score's.
    """

    target: Target
    geometry: Geometry
    paddings: tuple[int, ...]
    decode_paddings: tuple[int, ...]
    context: int
    notes: tuple[str, ...] = field(default=())
    score_paddings: tuple[int, ...] = ()

    @property
    def named_notes(self) -> list[str]:
        """The notes, each behind the target's name: an artifact may hold several."""
        return [f"{self.target.name}: {note}" for note in self.notes]

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every program, largest first within a phase, so that parallel builds end together."""
        rows = sorted({p // CHUNK for p in (*self.paddings, *self.score_paddings)} | set(self.decode_paddings))
        return (
            *(Cell("prefill", p) for p in reversed(self.paddings)),
            *(Cell("score", p) for p in reversed(self.score_paddings)),
            *(Cell("decode", p) for p in reversed(self.decode_paddings)),
            *(Cell("sample", r) for r in reversed(rows)),
        )

    def record(self) -> dict[str, Any]:
        """What the manifest says of the plan."""
        return {
            "paddings": list(self.paddings),
            "decode_paddings": list(self.decode_paddings),
            "score_paddings": list(self.score_paddings),
            "max_running": self.geometry.slots,
            "page_size": self.geometry.page_size,
            "context": self.context,
            "pages": self.geometry.pages,
            "dtype": self.geometry.dtype,
            "geometry": asdict(self.geometry),
        }


def parse_bytes(text: str, name: str = "--state-memory") -> int:
    """``4GiB``, ``512 MiB``, ``1000000``: bytes. Binary and decimal units are told apart.

    Raises:
        PlanError: Not a size.
    """
    units = {"": 1, "B": 1} | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
    units |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in units:
        raise PlanError(f"{name}: expected a size, found `{_short(text)}`", "write 4GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * units[match[2]])


def parse_paddings(text: str, name: str = "--paddings") -> tuple[int, ...]:
    """``16,128,512`` as integers.

    Raises:
        PlanError: Not a comma-separated list of integers.
    """
    if re.fullmatch(r"\s*-?[0-9]{1,18}\s*(,\s*-?[0-9]{1,18}\s*)*", text) is None:
        raise PlanError(f"{name}: expected integers with commas between, found `{_short(text)}`", "e.g. 16,128,512")
    return tuple(int(part) for part in text.split(","))


def _short(text: str) -> str:
    """The begin of what a user wrote, for a message."""
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_paddings(paddings: Sequence[int], name: str, multiple: int) -> None:
    """Ascending, positive, distinct multiples; none is dropped in silence.

    Raises:
        PlanError: With the first padding that is wrong.
    """
    if not paddings:
        raise PlanError(f"{name}: expected at least one padding, found none")
    for value in paddings:
        if value <= 0 or value % multiple:
            what = "a positive number" if multiple == 1 else f"a positive multiple of {multiple}"
            near = max(multiple, (value + multiple - 1) // multiple * multiple)
            raise PlanError(f"{name}: expected {what}, found {value}", f"the next one that can be built is {near}")
        if value > LARGEST_PADDING:
            raise PlanError(f"{name}: expected paddings of at most {LARGEST_PADDING:,}, found {value:,}")
    for left, right in itertools.pairwise(paddings):
        if left >= right:
            ordered = ",".join(str(p) for p in sorted(set(paddings)))
            raise PlanError(f"{name}: expected ascending paddings, found {left} before {right}", f"write {ordered}")


def derive_decode_paddings(paddings: tuple[int, ...], max_running: int) -> tuple[tuple[int, ...], str]:
    """Decode's paddings: those up to and including the first that holds ``max_running``; with the reason."""
    for index, padding in enumerate(paddings):
        if padding >= max_running:
            chosen = paddings[: index + 1]
            return (
                chosen,
                f"decode paddings {_numbers(chosen)}: {padding} is the first that holds {max_running} running",
            )
    return paddings, (
        f"decode paddings {_numbers(paddings)}: none holds {max_running} running, "
        f"so at most {paddings[-1]} sequences decode in one step and take turns"
    )


def _numbers(values: Sequence[int]) -> str:
    return ",".join(str(value) for value in values)


def forms(config: Config, target: Target) -> dict[str, Any]:
    """The forms of loops and pools that are best on a target (docs/log.md has the measurements)."""
    if target.chip is None:
        return {"latent_row": config.latent_dim}
    # A latent row of whole lanes: else the compiler copies the donated pool every step.
    lanes = target.chip.lanes
    return {
        "latent_row": -(-config.latent_dim // lanes) * lanes,
        "layer_loop": "unroll",
        "placement": "striped" if target.tp > 1 else "replicated",
        "attention": "pages",
        "experts": "local",
        "recurrence": "together",
    }


def make_plan(config: Config, options: Options, target_text: str) -> Plan:
    """Checks every option against the model and sizes the pools.

    Raises:
        PlanError: An option that cannot be built, named with what would work.
    """
    check_paddings(options.paddings, "--paddings", CHUNK)
    notes: list[str] = []
    if options.decode_paddings is None:
        decode, note = derive_decode_paddings(options.paddings, options.max_running)
        notes.append(note)
    else:
        check_paddings(options.decode_paddings, "--decode-paddings", 1)
        decode = options.decode_paddings
    if options.score_paddings:
        check_paddings(options.score_paddings, "--score-paddings", CHUNK)
    numbers = {"--max-running": options.max_running, "--page-size": options.page_size, "--pages": options.pages}
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise PlanError(f"{name}: expected a positive number, found {number}")
    if not 0 < options.memory_fraction <= 1:
        raise PlanError(f"--memory-fraction: expected above 0 and at most 1, found {options.memory_fraction}")
    limit = config.max_position_embeddings
    context = min(DEFAULT_CONTEXT, limit) if options.context is None else options.context
    if not 2 <= context <= limit:  # a prompt and an answer are a token each at least
        raise PlanError(f"--context: expected 2 to {limit} (max_position_embeddings), found {context}")
    target = parse_target(target_text, options.tp, config)
    chosen = options.tp is None and "@" not in target_text and target.platform == "cpu"
    if chosen and target.tp != DEFAULT_CPU_TP:
        notes.append(f"tp {target.tp}: the most of up to {DEFAULT_CPU_TP} devices that this model splits over")
    geometry = Geometry(
        tp=target.tp,
        dtype=options.dtype,
        slots=options.max_running,
        pages=0,
        page_size=options.page_size,
        max_pages=-(-context // options.page_size),
        **forms(config, target),
    )
    geometry, note = size_pages(config, geometry, options, target)
    notes.append(note)
    scored = tuple(options.score_paddings)
    return Plan(target, geometry, tuple(options.paddings), tuple(decode), context, tuple(notes), scored)


def make_plans(config: Config, options: Options) -> list[Plan]:
    """The plan of every target, each named once.

    Raises:
        PlanError: One cannot be built, or two are the same.
    """
    plans = [make_plan(config, options, target) for target in dict.fromkeys(options.targets)]
    names = [plan.target.name for plan in plans]
    if doubled := [name for name in names if names.count(name) > 1]:
        raise PlanError(f"--target: expected each target once, found {doubled[0]} twice")
    return plans

"""The options of ``ling3export build`` and ``plan``: their values and defaults, and how they are written."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ling3export.cost.chips import GIB
from ling3export.foundation.errors import PlanError

AS_STORED = "as-stored"  # the forms that the checkpoint has
LARGEST_PADDING = 2**20  # int32 offsets hold every field of a step up to here


@dataclass(frozen=True)
class Options:
    """The options of ``ling3export build``; the one place where their defaults live.

    Attributes:
        paddings: Padded tokens of the prefill programs: ascending multiples of 16.
        decode_paddings: Sequences of the decode programs; None derives them from ``paddings`` and ``max_running``.
        score_paddings: Padded tokens of the score programs; none without.
        afd: Whether to add decode programs whose experts an FFN worker computes.
        afd_dtype: The form of tokens for an FFN worker: the ``model``'s dtype, or ``int8`` with a scale each.
        tp: Devices that share the model on cpu; None is 16, or all shards of a model that has fewer.
        targets: ``PLATFORM[:KIND][:TOPOLOGY][@TP]``.
        max_running: Sequences that hold state at once.
        page_size: Tokens a latent page.
        context: Longest sequence; None is 8192 or the model's limit, whichever is less.
        memory_fraction: The share of an accelerator's memory that weights and pools may take.
        state_memory: Bytes for the state of all virtual devices of a cpu target together.
        pages: Latent pages; None takes what fits, at most what ``max_running`` full sequences need.
        snapshots: Further slots for copies of sequences' states; above 0 with programs that move states.
        dtype: ``bfloat16`` or ``float32`` (highest matmul precision throughout).
        weights: The stored forms of the weights: ``as-stored``, or a key of ``artifacts/parameters.py``'s WEIGHTS.
        jobs: Cells compiled at a time; None is one a core.
        kernels: Native kernels in executables for cpu: ``auto`` (where they pay), ``on`` or ``off``.
        graphs: Whether to ``keep`` the compilers' programs as text, for ``ling3export graph``, or to ``drop`` them.
    """

    paddings: tuple[int, ...] = (16, 128, 512)
    decode_paddings: tuple[int, ...] | None = None
    score_paddings: tuple[int, ...] = ()
    afd: bool = False
    afd_dtype: str = "model"
    tp: int | None = None
    targets: tuple[str, ...] = ("cpu",)
    max_running: int = 64
    page_size: int = 256
    context: int | None = None
    memory_fraction: float = 0.6
    state_memory: int = 4 * GIB
    pages: int | None = None
    snapshots: int = 0
    dtype: str = "bfloat16"
    weights: str = AS_STORED
    jobs: int | None = None
    kernels: str = "auto"
    graphs: str = "keep"


# Shared by all targets of an artifact: a target that is added takes them as they are.
SHARED = ("paddings", "decode_paddings", "max_running", "page_size", "context", "dtype", "weights")


def parse_bytes(text: str, name: str = "--state-memory") -> int:
    """``4GiB``, ``512 MiB``, ``1000000``: bytes. Binary and decimal units differ.

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
    """The beginning of a user's text, for a message."""
    return text if len(text) <= 60 else f"{text[:60]}…"


def check_paddings(paddings: Sequence[int], name: str, multiple: int) -> None:
    """Ascending, positive, distinct multiples; none is dropped in silence.

    Raises:
        PlanError: With the first padding that is wrong.
    """
    if not paddings:
        raise PlanError(f"{name}: no padding is given")
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

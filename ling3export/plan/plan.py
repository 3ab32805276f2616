"""The plan: paddings, parallelism, targets and pool sizes, checked before any work is done."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.parameters import FORMS, PLAIN, WEIGHTS
from ling3export.foundation.errors import PlanError
from ling3export.foundation.phases import PHASES
from ling3export.model.config import Config, parsed, read_config
from ling3export.model.geometry import CHUNK, Geometry
from ling3export.model.quantization import quantization
from ling3export.plan.kernels import choose
from ling3export.plan.memory import size_pages
from ling3export.plan.options import AS_STORED, Options, check_paddings
from ling3export.plan.targets import DEFAULT_CPU_TP, TargetSpec, parse_target

DEFAULT_CONTEXT = 8192
SLOTS_MOVED = 8  # pairs of slots that a call copies at most
PAGES_MOVED = 8  # latent pages that a call moves at most: 14 MB of Ling3-Tiny's, with 20 MB of state
MOST_SNAPSHOTS = 2**16


@dataclass(frozen=True)
class PlannedCell:
    """One program: a phase at a padding (padded tokens, sequences or rows; pairs of slots, or pages)."""

    phase: str
    padding: int

    @property
    def name(self) -> str:
        """``prefill@512`` and its like."""
        return f"{self.phase}@{self.padding}"


@dataclass(frozen=True)
class Plan:
    """A checked plan for one target."""

    target: TargetSpec  # the machine
    geometry: Geometry  # what its programs are compiled for
    paddings: tuple[int, ...]  # prefill's
    decode_paddings: tuple[int, ...]  # decode's
    context: int  # longest sequence in tokens
    notes: tuple[str, ...] = ()  # lines for the user: what was chosen, and why
    score_paddings: tuple[int, ...] = ()  # score's
    ffn_paddings: tuple[int, ...] = ()  # those of dispatch and experts; with none, decode steps are not cut
    graphs: bool = True  # whether the artifact keeps the compiled programs as text

    @property
    def named_notes(self) -> list[str]:
        """The notes, each after the target's name: an artifact may hold several."""
        return [f"{self.target.name}: {note}" for note in self.notes]

    @property
    def cells(self) -> tuple[PlannedCell, ...]:
        """Every program, largest first within a phase, so that parallel builds end together."""
        geometry = self.geometry
        step = geometry.tp if geometry.striped else 1  # each device gives as many pages
        sizes: dict[str, Iterable[int]] = {
            "prefill": self.paddings,
            "score": self.score_paddings,
            "decode": self.decode_paddings,
            "rows": {p // CHUNK for p in (*self.paddings, *self.score_paddings)} | set(self.decode_paddings),
            "slots": (SLOTS_MOVED,),
            "pages": (-(-min(geometry.max_pages, PAGES_MOVED) // step) * step,),
            "pairs": self.ffn_paddings,
        }
        features = {"score": self.score_paddings, "snapshots": geometry.snapshots, "split": self.ffn_paddings}
        return tuple(
            PlannedCell(record.name, padding)
            for record in PHASES.values()
            if all(features[need] for need in record.needs)
            for padding in sorted(sizes[record.sizes], reverse=True)
        )

    def record(self) -> dict[str, Any]:
        """The plan as JSON, for keys of the cache and for a SavedModel."""
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
            **({"ffn_paddings": list(self.ffn_paddings)} if self.ffn_paddings else {}),
        }


def derive_decode_paddings(paddings: Sequence[int], max_running: int) -> tuple[tuple[int, ...], str]:
    """The decode paddings of a build that names none, and a line that says why.

    They are 1, so that one user does not pay for sixteen, then ``paddings`` up to the first that holds ``max_running``
    sequences, in whose place stands ``max_running`` itself, rounded up to a multiple of 16.
    """
    if max_running == 1:
        return (1,), "decode paddings 1: one sequence runs at a time"
    last = -(-max_running // CHUNK) * CHUNK
    chosen = (1, *(padding for padding in paddings if padding < last), last)
    held = f"all {max_running} running"
    if last != max_running:
        held += f", rounded up to {last}"
    return chosen, f"decode paddings {','.join(map(str, chosen))}: from one sequence alone to {held}"


def derive_ffn_paddings(config: Config, decode: Sequence[int]) -> tuple[int, ...]:
    """Pairs of a token and one of its experts of each micro batch, whose sizes are those of ``decode``.

    Raises:
        PlanError: There are no experts to split off.
    """
    if not config.layers("moe"):
        raise PlanError("--afd: expected a model with experts, found only dense layers")
    return tuple(size * config.num_experts_per_tok for size in decode)


def forms(config: Config, target: TargetSpec) -> dict[str, Any]:
    """The form of programs that is best on a target, and its latent rows (docs/log/ has the measurements)."""
    if target.chip is None:
        return {"latent_row": config.latent_dim}
    # A latent row of whole lanes: else the compiler copies the donated pool every step.
    lanes = target.chip.lanes
    form = "tiles" if target.platform == "tpu" else "card"
    return {"latent_row": -(-config.latent_dim // lanes) * lanes, "form": form}


def as_stored(options: Options, checkpoint: Path) -> Options:
    """Replaces ``as-stored`` by ``int4-experts`` if the checkpoint is quantized so.

    Args:
        options: Options of a build.
        checkpoint: A folder, or a config.json itself, with the ``quantization_config``.

    Raises:
        ConfigError: There is no config.json, or it names another quantization than the published ones.
    """
    if options.weights != AS_STORED:
        return options
    file = checkpoint / "config.json" if checkpoint.is_dir() else checkpoint
    stored = quantization(parsed(read_config(file), str(file)), str(file))
    return replace(options, weights="int4-experts") if stored is not None and stored.form == "int4" else options


def weight_forms(options: Options) -> str:
    """The forms of an artifact's weights, a key of WEIGHTS.

    Raises:
        PlanError: There is no such form.
    """
    if options.weights == AS_STORED:
        return PLAIN
    if options.weights not in WEIGHTS:
        raise PlanError(f"--weights: expected {', '.join(WEIGHTS)} or {AS_STORED}, found {options.weights}")
    return options.weights


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
    if not 0 <= options.snapshots <= MOST_SNAPSHOTS:
        raise PlanError(f"--snapshots: expected 0 to {MOST_SNAPSHOTS}, found {options.snapshots}")
    if options.afd_dtype != "model" and (options.dtype != "bfloat16" or not options.afd):
        actual = f"--dtype {options.dtype}{' and no --afd' * (not options.afd)}"
        raise PlanError(f"--afd-dtype {options.afd_dtype}: expected --dtype bfloat16 and --afd, found {actual}")
    if not 0 < options.memory_fraction <= 1:
        raise PlanError(f"--memory-fraction: expected above 0 and at most 1, found {options.memory_fraction}")
    limit = config.context
    context = min(DEFAULT_CONTEXT, limit) if options.context is None else options.context
    if not 2 <= context <= limit:  # a prompt and an answer are a token each at least
        scaled = limit > config.max_position_embeddings
        source = (
            "factor times original_max_position_embeddings of rope_scaling" if scaled else "max_position_embeddings"
        )
        raise PlanError(f"--context: expected 2 to {limit} ({source}), found {context}")
    target = parse_target(target_text, options.tp, config)
    chosen = options.tp is None and "@" not in target_text and target.platform == "cpu"
    if chosen and target.tp != DEFAULT_CPU_TP:
        notes.append(f"tp {target.tp}: the most of up to {DEFAULT_CPU_TP} devices that this model splits over")
    kernels, kernel_note = choose(config, options, target)
    notes += [] if kernel_note is None else [kernel_note]
    weights = weight_forms(options)
    # Kernels multiply integers where groups of values share a scale (docs/log/kernels-cpu.md).
    narrow = bool(kernels) and any(FORMS[form].group for form in WEIGHTS[weights] if form != PLAIN)
    geometry = Geometry(
        tp=target.tp,
        dtype=options.dtype,
        slots=options.max_running,
        pages=0,
        page_size=options.page_size,
        max_pages=-(-context // options.page_size),
        snapshots=options.snapshots,
        kernels=kernels,
        token_dtype=options.afd_dtype,
        weights=weights,
        activations="int8" if narrow else "bf16",
        **forms(config, target),
    )
    geometry, note = size_pages(config, geometry, options, target)
    notes.append(note)
    scored, split = tuple(options.score_paddings), derive_ffn_paddings(config, decode) if options.afd else ()
    kept = options.graphs == "keep"
    return Plan(target, geometry, tuple(options.paddings), tuple(decode), context, tuple(notes), scored, split, kept)


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

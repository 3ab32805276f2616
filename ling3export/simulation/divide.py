"""How to divide a number of chips among replicas for given requests: paddings, prefill to decode, and the router.

A line of the requests' file is ``{"prompt_tokens": 317, "output_tokens": 50, "count": 3}``, perhaps with
``"prefix_tokens": 256, "prefixes": 4``: the prompts of this line begin with one of four texts of 256 tokens.

Replicas do not slow each other, so what a fleet passes is simulated with GROUP replicas at most, and multiplied.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ling3export.artifacts.records import within
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import PlanError
from ling3export.foundation.tables import aligned
from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK
from ling3export.model.state import snapshot_bytes
from ling3export.plan.options import Options
from ling3export.plan.paddings import Count, read_records
from ling3export.plan.plan import make_plan
from ling3export.plan.pricing import PricedTarget, priced
from ling3export.simulation.fleet import Fleet, simulate
from ling3export.simulation.replica import CallTimes, SimulatedRequest

GROUP = 8  # replicas of a simulation
WAVES = 4  # requests of a simulation for each slot of its replicas
SHARE = 0.8  # of what a fleet passes at most, where times are looked at
NEAR = 0.98  # of the best is as good as the best
HANDOVER = 1e-3  # seconds until the first byte of a state is on its way; assumed
LINK = 25e9  # bytes a second from one replica to another; assumed
# Processor seconds of vllm-router 0.1.17, cache_aware, for a request and a streamed token: docs/log/fleet.md.
ROUTER_CALL, ROUTER_TOKEN = 8e-4, 6.5e-5
ROUTER_CORES = 16  # processors of a router's machine
PHASES = ("prefill", "decode", "sample")  # whose calls are simulated
EXAMPLE = 'a line is {"prompt_tokens": 317, "output_tokens": 50, "count": 3}'


@dataclass(frozen=True)
class RequestKind:
    """A line of the file: ``count`` requests that are alike; their prompts may have beginnings in common."""

    prompt_tokens: Count
    output_tokens: Count
    count: Count = 1
    prefix_tokens: Annotated[int, within(0, 2**40)] = 0
    prefixes: Count = 1


@dataclass(frozen=True)
class Division:
    """What a fleet passes at most, and its times at SHARE of that.

    Attributes:
        both: Replicas that prefill and decode; and those that do one of them.
        prefill: See ``both``.
        decode: See ``both``.
        requests_per_second: At most.
        first_token: Median and p99 in seconds.
        each_token: Median and p99 in seconds of a request's tokens behind the first.
    """

    both: int
    prefill: int
    decode: int
    requests_per_second: float
    first_token: tuple[float, float]
    each_token: tuple[float, float]

    @property
    def name(self) -> str:
        """``62`` or ``8P54D``."""
        return str(self.both) if self.both else f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True)
class FleetPlan:
    """How to divide the chips.

    Attributes:
        replicas: How many there are.
        chips: Of a replica.
        prompt_tokens: Of a request, on average.
        output_tokens: The same.
        paddings: Requests a second of the whole fleet by the largest prefill and the largest decode padding.
        best_paddings: Those of them that are smallest among the best.
        divisions: With these, the ways to divide.
        best: The one of them that passes most; undivided where that is as good.
        router: Requests a second that one router passes.
        times: What the times of calls are: ``measured``, by the calibration beside the artifact; ``estimated``, by the
            compiler; or ``bounds``, by the roofline.
        note: What measured, and when; or why a calibration that is there is not used.
    """

    replicas: int
    chips: int
    prompt_tokens: float
    output_tokens: float
    paddings: dict[str, float]
    best_paddings: tuple[int, int]
    divisions: tuple[Division, ...]
    best: Division
    router: float
    times: str
    note: str | None


def read_kinds(path: Path) -> list[RequestKind]:
    """The lines of a file.

    Raises:
        PlanError: No file, no JSON, an unknown or missing field, or a number out of its bounds; with the line.
    """
    kinds = read_records(path, "--fleet", RequestKind, EXAMPLE)
    for kind in kinds:
        if kind.prefix_tokens >= kind.prompt_tokens:
            found = f"found {kind.prefix_tokens} and {kind.prompt_tokens}, in {path.name}"
            raise PlanError(f"--fleet: expected prefix_tokens below prompt_tokens, {found}", EXAMPLE)
    return kinds


def requests(kinds: Sequence[RequestKind], count: int, rate: float = 0.0, seed: int = 0) -> Iterator[SimulatedRequest]:
    """``count`` requests drawn from kinds, with random gaps at ``rate`` a second; all at once where it is 0."""
    rng, at = random.Random(seed), 0.0
    weights = list(itertools.accumulate(kind.count for kind in kinds))
    numbered = range(len(kinds))
    for _ in range(count):
        if rate:
            at += rng.expovariate(rate)
        number = rng.choices(numbered, cum_weights=weights)[0]
        kind = kinds[number]
        prefix = number * 2**40 + rng.randrange(kind.prefixes) if kind.prefix_tokens else -1
        yield SimulatedRequest(at, kind.prompt_tokens, kind.output_tokens, prefix, kind.prefix_tokens)


def source_of(target: PricedTarget) -> str:
    """What the times of a target's calls can be: the best that all of them have.

    Raises:
        PlanError: None is known.
    """
    cells = [cell for name, cell in target.cells.items() if name.partition("@")[0] in PHASES]
    if all(cell.measured_seconds is not None for cell in cells):
        return "measured"
    if any(cell.bound is None for cell in cells):
        raise PlanError(
            f"--fleet: expected a target whose times are known, found `{target.target}`",
            "estimates and bounds are those of accelerators, such as --target tpu:v6e:4x4; --from ARTIFACT takes what "
            "ling3-runner calibrate measured",
        )
    return "bounds" if any(cell.estimated_seconds is None for cell in cells) else "estimated"


def times_of(target: PricedTarget, prefill: Sequence[int], decode: Sequence[int], prefixes: int) -> CallTimes:
    """The calls of a replica with these paddings, by ``source_of``, with collectives and sampling.

    Raises:
        PlanError: No times are known.
    """
    source = source_of(target)

    def seconds(name: str, collectives: bool = True) -> float:
        cell = target.cells[name]
        if source == "measured":
            return cell.measured_seconds or 0.0  # with all that belongs to it
        assert cell.bound is not None
        found = cell.bound.seconds if source == "bounds" else cell.estimated_seconds
        return (found or 0.0) + cell.bound.collective_seconds * collectives

    slots = min(target.pool.slots, decode[-1])
    costs = tuple(seconds(f"prefill@{each}", collectives=False) for each in prefill)  # as the runner takes them
    return CallTimes(
        {each: seconds(f"prefill@{each}") + seconds(f"sample@{each // CHUNK}") for each in prefill},
        {each: seconds(f"decode@{each}") + seconds(f"sample@{each}") for each in decode},
        slots,
        target.pool.tokens * slots / target.pool.slots,
        prefixes,
        CHUNK,
        costs,
    )


def divided(fleet: Fleet, kinds: Sequence[RequestKind], replicas: int) -> Division:
    """What ``replicas`` pass at most, divided as those of ``fleet`` are, and their times at SHARE of that."""
    some = fleet.both + fleet.prefill + fleet.decode
    count = WAVES * fleet.times.slots * some
    most = simulate(fleet, requests(kinds, count)).capacity
    found = simulate(fleet, requests(kinds, count, SHARE * most, 1))
    scale = replicas / some
    prefill = round(scale * fleet.prefill)
    return Division(
        replicas if fleet.both else 0,
        prefill,
        0 if fleet.both else replicas - prefill,
        most * scale,
        found.first_token(),
        found.each_token(),
    )


def plan_fleet(
    config: Config,
    options: Options,
    kinds: Sequence[RequestKind],
    chips: int,
    artifact: Path | None = None,
    ignore: Sequence[str] = (),
) -> FleetPlan:
    """Simulates fleets of what ``options`` plan.

    Args:
        config: The model.
        options: Of a build, for one target. Beginnings of their paddings are compared.
        kinds: The requests.
        chips: To be divided.
        artifact: Compiled for the same plan: gives estimates, or times where a calibration is beside it.
        ignore: Fields of config.json that were ignored.

    Raises:
        PlanError: There are fewer chips than a replica has, a request does not fit, or times are not known.
    """
    if len(options.targets) != 1:
        raise PlanError(f"--fleet: expected one --target, found {len(options.targets)}")
    geometry = make_plan(config, options, options.targets[0]).geometry
    latents = config.latent_dim * len(config.layers("mla")) * BY_NAME[options.dtype].nbytes
    state = snapshot_bytes(config, geometry), latents
    planned = priced(config, options, (), artifact, ignore)
    (target,) = planned.targets.values()
    replicas = chips // target.tp
    if not replicas:
        raise PlanError(f"--chips: expected at least the {target.tp} of {target.target}, found {chips}")
    whole = sum(kind.count for kind in kinds)
    prompt = sum(kind.count * kind.prompt_tokens for kind in kinds) / whole
    output = sum(kind.count * kind.output_tokens for kind in kinds) / whole
    for kind in kinds:
        if kind.prompt_tokens + kind.output_tokens > planned.context:
            found = f"found {kind.prompt_tokens} and {kind.output_tokens} tokens"
            raise PlanError(f"--fleet: expected requests within the context of {planned.context}, {found}")
    paddings: dict[tuple[int, int], tuple[float, CallTimes]] = {}
    for prefill, decode in itertools.product(_beginnings(planned.paddings), _beginnings(planned.decode_paddings)):
        times = times_of(target, prefill, decode, options.snapshots)
        count = 2 * WAVES * times.slots
        one = simulate(Fleet(times, both=1), requests(kinds, count))
        paddings[prefill[-1], decode[-1]] = one.capacity * replicas, times
    most = max(rate for rate, _ in paddings.values())
    best = next(pair for pair, (rate, _) in paddings.items() if rate >= NEAR * most)
    group = Fleet(
        paddings[best][1],
        both=min(replicas, GROUP),
        handover=HANDOVER + state[0] / LINK,
        handover_token=state[1] / LINK,
    )
    ways = [group, *(replace(group, both=0, prefill=n, decode=group.both - n) for n in range(1, group.both))]
    divisions = tuple(divided(way, kinds, replicas) for way in ways)
    most = max(division.requests_per_second for division in divisions)
    return FleetPlan(
        replicas,
        target.tp,
        prompt,
        output,
        {f"{p},{d}": found for (p, d), (found, _) in paddings.items()},
        best,
        divisions,
        next(each for each in divisions if each.requests_per_second >= NEAR * most),
        ROUTER_CORES / (ROUTER_CALL + ROUTER_TOKEN * output),
        source_of(target),
        target.measured,
    )


def _beginnings(paddings: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(paddings[: n + 1]) for n in range(len(paddings))]


def described(plan: FleetPlan) -> str:
    """The text for a person."""
    found = [[f"{rate:,.0f}" for rate in plan.paddings.values()], [*plan.paddings]]
    rows = [("prefill to", "decode to", "requests/s")]
    rows += [(*pair.split(","), rate) for rate, pair in zip(*found, strict=True)]
    divisions: list[tuple[str, ...]] = [
        ("replicas", "requests/s", "first token ms, p50", "p99", "each token ms, p50", "p99")
    ]
    for each in plan.divisions:
        seconds = (*each.first_token, *each.each_token)
        columns = (f"{1e3 * value:,.2f}" for value in seconds)
        divisions.append((each.name, f"{each.requests_per_second:,.0f}", *columns))
    best, router = plan.best, plan.router
    source = {
        "measured": str(plan.note),
        "estimated": "the compiler's estimates",
        "bounds": "roofline bounds, which no program reaches",
    }[plan.times]
    prefill, decode = plan.best_paddings
    return "\n".join(
        [
            f"fleet  {plan.replicas} replicas of {plan.chips} chips; on average {plan.prompt_tokens:,.0f} tokens "
            f"in, {plan.output_tokens:,.0f} out; times are {source}",
            *([] if plan.note is None or plan.times == "measured" else [f"  {plan.note}"]),
            *aligned(rows),
            f"  with prefill to {prefill} and decode to {decode}; times at {SHARE:.0%} of the requests",
            *aligned(divisions),
            f"  best: {best.name}, {best.requests_per_second:,.0f} requests/s",
            f"  one router passes {router:,.0f} requests/s on {ROUTER_CORES} cores: "
            f"it is the limit from {plan.replicas * router / best.requests_per_second:,.0f} replicas on",
        ]
    )

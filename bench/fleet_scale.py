"""A thousand chips and a million requests, simulated: ratio of prefill to decode, paddings, router; draws the plots.

Times of calls on a v6e slice of 16 chips, in seconds: the compiler's estimates of the true configuration until
2026-11-22 (docs/log/fleet.md), with 10 µs for each collective. What paddings change is priced by roofline bounds, or
by the estimates of an artifact that has them all.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report import machine, say, show, table
from ling3export.checkpoint.synth import config_fields
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.pricing import priced
from ling3export.simulation.answer import (
    HANDOVER,
    LINK,
    ROUTER_CALL,
    ROUTER_CORES,
    ROUTER_TOKEN,
    SHARE,
    WAVES,
    Kind,
    asks,
    divided,
    source_of,
    times_of,
)
from ling3export.simulation.fleet import Fleet, simulate
from ling3export.simulation.replica import Times

TARGET, CHIPS = "tpu:v6e:4x4", 1000
REPLICAS = CHIPS // 16
TIMES = Times({512: 3.48e-3}, {1: 1.97e-3, 16: 2.02e-3, 64: 2.41e-3}, 64)
KINDS = (Kind(1000, 200, 5), Kind(3000, 300, 2, prefix_tokens=2048, prefixes=200), Kind(200, 500, 3))
GROUP = 16  # replicas of the simulations but the last
FAILURES, RESTART = 3600.0, 120.0  # seconds between two failures of a replica, and until it is there again
STATE, LATENT = 20e6, 6 * 576 * 2  # bytes of a sequence's state, and of each of its tokens
WHOLE = Fleet(
    (replace(TIMES, prefixes=64),),
    both=REPLICAS,
    policy="cache_aware",
    handover=HANDOVER + STATE / LINK,
    handover_token=LATENT / LINK,
)
LOADS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
ASKED = 8_000  # requests at each load
PREFILL, DECODE = (128, 512, 1024, 2048), (1, 16, 64, 128, 256)
Points = Sequence[tuple[float, float]]
COLOURS = ("#1f6f8b", "#c8553d", "#6a994e", "#7b5ea7", "#888888")


def plot(path: Path, title: str, across: str, up: str, lines: dict[str, Points]) -> None:
    """Writes lines over points as a small SVG, both axes from 0."""
    wide, high, left, foot = 560, 300, 62, 46
    most = [max(point[axis] for points in lines.values() for point in points) * 1.05 for axis in (0, 1)]

    def place(x: float, y: float) -> str:
        return f"{left + x / most[0] * (wide - left - 12):.1f},{high - foot - y / most[1] * (high - foot - 34):.1f}"

    parts = [f'<text x="{left}" y="18" font-weight="bold">{title}</text>']
    for n in range(6):
        x, y = most[0] * n / 5, most[1] * n / 5
        (at_x, at_y), (_, floor), (wall, _) = (place(*each).split(",") for each in ((x, y), (x, 0), (0, y)))
        parts.append(f'<text x="{at_x}" y="{float(floor) + 16:.0f}" text-anchor="middle">{x:,.4g}</text>')
        parts.append(f'<text x="{left - 6}" y="{at_y}" text-anchor="end">{y:,.4g}</text>')
        parts.append(f'<line x1="{wall}" y1="{at_y}" x2="{wide - 12}" y2="{at_y}" stroke="#ddd"/>')
    for number, (name, points) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        dots = " ".join(place(*point) for point in sorted(points))
        parts.append(f'<polyline points="{dots}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 10}" y="{50 + 15 * number}" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{wide / 2}" y="{high - 8}" text-anchor="middle">{across}</text>')
    parts.append(f'<text x="8" y="30" fill="#555">{up}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="11">'
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""]))


def ratios(folder: Path, group: Fleet) -> tuple[dict[str, Any], tuple[str, Fleet]]:
    """What each ratio passes, in steps of a replica of the group; the best divided one, and its name."""
    ways = [group, *(replace(group, both=0, prefill=n, decode=GROUP - n) for n in range(2, GROUP - 3, 2))]
    found = [(way, divided(way, KINDS, REPLICAS)) for way in ways]
    points = [(way.prefill / GROUP, each.requests_per_second) for way, each in found[1:]]
    level = found[0][1].requests_per_second
    lines: dict[str, Points] = {
        "prefill and decode apart": points,
        "every replica does both": [(0.0, level), (1.0, level)],
    }
    plot(folder / "ratio.svg", "What 62 replicas pass", "share of replicas that prefill", "requests/s", lines)
    best = max(found[1:], key=lambda pair: pair[1].requests_per_second)
    return {each.name: vars(each) for _, each in found}, (best[1].name, best[0])


def loads(folder: Path, fleets: dict[str, tuple[Fleet, float]]) -> dict[str, Any]:
    """Times to the first token and of each token by load, without a router's limit."""
    first: dict[str, Points] = {}
    each: dict[str, Points] = {}
    result: dict[str, Any] = {}
    for name, (fleet, most) in fleets.items():
        rows = []
        for load in LOADS:
            found = simulate(fleet, asks(KINDS, ASKED, load * most * GROUP / REPLICAS, 3))
            rows.append([load * most, *(1e3 * value for value in (*found.first_token(), *found.each_token()))])
        first[name], each[name] = [(row[0], row[2]) for row in rows], [(row[0], row[4]) for row in rows]
        result[name] = rows
    plot(folder / "first-token.svg", "Time to the first token, p99", "requests/s", "ms", first)
    plot(folder / "each-token.svg", "Time of each further token, p99", "requests/s", "ms", each)
    return result


def paddings(folder: Path, artifact: Path | None) -> dict[str, float]:
    """What a replica of both kinds passes by its largest paddings: by roofline bounds, or an artifact's estimates."""
    config = Config.from_dict(config_fields("full", {}))
    options = Options(paddings=PREFILL, decode_paddings=DECODE, max_running=256, targets=(TARGET,))
    (target,) = priced(config, options, (), artifact).targets.values()
    source = {"bounds": "by roofline bounds", "estimated": "by the compiler's estimates"}[source_of(target)]
    lines: dict[str, list[tuple[float, float]]] = {}
    for decode in range(1, len(DECODE)):
        for prefill in range(len(PREFILL)):
            times = times_of(target, PREFILL[: prefill + 1], DECODE[: decode + 1], 0)
            found = simulate(Fleet((times,), both=1), asks(KINDS, 2 * WAVES * times.slots)).capacity * REPLICAS
            lines.setdefault(f"decode to {DECODE[decode]}", []).append((PREFILL[prefill], found))
    plot(folder / "paddings.svg", f"Paddings, {source}", "largest prefill padding", "requests/s", dict(lines))
    return {f"{name}, prefill to {x:g}": y for name, points in lines.items() for x, y in points}


def routed(whole: Fleet, rate: float, counts: dict[int, int]) -> list[list[Any]]:
    """With failures, and as many requests as ``counts`` says behind each number of routers.

    Returns:
        Routers, requests, requests a second, median and p99 in ms of the first and of each further token, requests that
        failures took, the share of time that routers are busy, seconds and events of the simulation.
    """
    rows = []
    for routers, count in counts.items():
        share = ROUTER_CORES * routers
        fleet = replace(
            whole,
            failures=FAILURES,
            restart=RESTART,
            router_call=ROUTER_CALL / share,
            router_token=ROUTER_TOKEN / share,
        )
        began = time.perf_counter()
        found = simulate(fleet, asks(KINDS, count, rate, 4))
        took = time.perf_counter() - began
        spread = [1e3 * value for value in (*found.first_token(), *found.each_token())]
        passed = len(found.ended) / found.seconds
        rows.append([routers, count, passed, *spread, found.lost, found.router, took, found.events])
    return rows


def main(folder: Path, requests: int, artifact: Path | None = None) -> dict[str, Any]:
    """Simulates, draws into ``folder`` and prints.

    Args:
        folder: Of the plots.
        requests: How many the last run has.
        artifact: The true configuration built for PREFILL and DECODE on the target, weights or none: its estimates are
            what paddings are compared by.
    """
    group = replace(WHOLE, both=GROUP)
    say("ratios")
    divisions, best = ratios(folder, group)
    most = {name: row["requests_per_second"] for name, row in divisions.items()}
    both = most[str(REPLICAS)]
    say("loads")
    by_load = loads(
        folder, {"every replica does both": (group, both), f"best ratio, {best[0]}": (best[1], most[best[0]])}
    )
    say("paddings")
    by_padding = paddings(folder, artifact)
    output = sum(kind.count * kind.output_tokens for kind in KINDS) / sum(kind.count for kind in KINDS)
    passes = ROUTER_CORES / (ROUTER_CALL + ROUTER_TOKEN * output)
    needed = int(SHARE * both / passes) + 1
    say(f"{requests} requests, with failures, behind {needed} routers")
    rows = routed(WHOLE, SHARE * both, {1: min(requests, 20_000), needed: requests})
    head = [
        "routers",
        "requests",
        "requests/s",
        "TTFT p50 ms",
        "p99",
        "TPOT p50 ms",
        "p99",
        "lost",
        "busy",
        "s",
        "events",
    ]
    tables = [
        table(
            ["replicas", "requests/s", "TTFT p99 ms", "TPOT p99 ms"],
            [
                [name, row["requests_per_second"], 1e3 * row["first_token"][1], 1e3 * row["each_token"][1]]
                for name, row in divisions.items()
            ],
        ),
        table(["paddings", "requests/s"], [[name, rate] for name, rate in by_padding.items()]),
        table(head, rows),
    ]
    told = {
        "benchmark": "fleet-scale",
        "machine": machine(),
        "divisions": divisions,
        "loads": by_load,
        "paddings": by_padding,
        "routers": rows,
        "router_passes": passes,
    }
    show(f"{CHIPS} chips as {REPLICAS} replicas; one router passes {passes:,.0f} requests/s", tables, told)
    return told

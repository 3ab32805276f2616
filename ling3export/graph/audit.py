"""Rules that a compiled program must keep, and budgets for what it may cost.

A rule yields findings: the operation, its layer kind, the bytes, and a remedy. A budgets file (TOML) sets the limits of
the rules and limits for the sums of each cell::

    [rules]
    large-copy = 1_000_000        # bytes; false switches a rule off

    [cells."decode@16"]
    seconds = 0.00105             # the program may not take longer, by the account of `graph summary`
    collectives = 61
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ling3export.artifacts.records import Record, from_json
from ling3export.foundation.errors import PlanError, listed
from ling3export.foundation.tables import footnotes, selected
from ling3export.graph.hlo import COLLECTIVES, ELEMENTWISE, LAYOUT
from ling3export.graph.record import QUANTITIES, Graph, Operation, summed

# Custom calls that programs of this project have: native kernels, Pallas, sorts, and names that cost nothing.
LISTED = re.compile(
    r"ling3_\w+(\.[\w-]+)?|tpu_custom_call|ConcatBitcast|AllocateBuffer|Sharding|SPMD\w+|TopK|\w*topk"
    r"|__cub\$\w+|__cublas\$\w+|__cudnn\$\w+|__triton\S*|annotate_device_placement"
)
CALLBACKS = re.compile(r".*(callback|xla_python|xla_ffi_partitioned_python).*", re.IGNORECASE)
SCHEMA = "ling3.graph.audit/1"
HOST = {"infeed", "outfeed", "send", "recv"}


@dataclass(frozen=True)
class Finding:
    """A broken rule of a program: the rule, the operation or input, bytes, and what to do."""

    rule: str
    subject: str
    layer_kind: str | None
    amount: str
    remedy: str


@dataclass(frozen=True)
class Expected:
    """A cell's program by its plan.

    Attributes:
        state: Names of the state arrays that the call gives back.
        collectives: How many collectives the model's formula has; None if nothing tells.
        flops: FLOPs that the tokens of a call need; None if nothing tells.
    """

    state: tuple[str, ...] = ()
    collectives: int | None = None
    flops: float | None = None


class Budgets(Record, frozen=True):
    """Limits of the rules by name (False for a rule that is off), and limits of sums by cell."""

    rules: Mapping[str, float | bool] = MappingProxyType({})
    cells: Mapping[str, Mapping[str, float]] = MappingProxyType({})

    def limit(self, rule: str) -> float | None:
        """The limit of a rule; None if the rule is off."""
        value = self.rules.get(rule, DEFAULTS[rule])
        return None if value is False else DEFAULTS[rule] if value is True else float(value)


# The limits of the rules: bytes, or for ``extra-flops`` a factor.
DEFAULTS: dict[str, float] = {
    "fp32-weights": 1e6,
    "large-copy": 1e6,
    "weight-layout": 1e6,
    "host-callback": 0,
    "custom-call": 0,
    "large-constant": 1e6,
    "state-donation": 0,
    "collectives": 0,
    "dynamic-shape": 0,
    "extra-flops": 32,
}
LIMITS = (*QUANTITIES, "collectives", "fusions", "peak_bytes", "unscoped_share")


def budgets(text: str, where: str) -> Budgets:
    """Reads a budgets file.

    Raises:
        PlanError: It is no TOML, names an unknown rule or sum, or a limit is no number.
    """
    try:
        limits = from_json(Budgets, tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: {error}", 'write numbers in [rules] and [cells."decode@16"]') from None
    for table, known in ((limits.rules, tuple(DEFAULTS)), *((limits, LIMITS) for limits in limits.cells.values())):
        if unknown := [name for name in table if name not in known]:
            raise PlanError(f"{where}: unknown name {unknown[0]}", f"known are {listed(sorted(known), 20)}")
    return limits


def audit(graph: Graph, expected: Expected, limits: Budgets) -> list[Finding]:
    """Every rule and budget that a program breaks."""
    findings = []
    for rule, (breaks, remedy) in OF_OPERATIONS.items():
        if (limit := limits.limit(rule)) is not None:
            findings += [_finding(rule, one, remedy(one)) for one in graph.operations if breaks(one, limit)]
    findings += _of_program(graph, expected, limits)
    return [*findings, *over_budget(graph, limits.cells.get(graph.cell, {}))]


def over_budget(graph: Graph, limits: Mapping[str, float]) -> Iterator[Finding]:
    """Sums of a cell that exceed its limits."""
    amounts = quantities(graph)
    for name, limit in limits.items():
        amount = amounts.get(name)
        if amount is not None and amount > limit:
            yield Finding(
                "budget", f"{graph.cell} {name}", None, f"{amount:.6g} > {limit:.6g}", "find the cause: graph diff"
            )


def quantities(graph: Graph) -> dict[str, float | None]:
    """The sums that a budget may limit."""
    total = graph.totals()
    unscoped = summed(None, "", [one for one in graph.operations if one.layer_kind is None])
    return {
        **total.sums,
        "collectives": _runs(graph),
        "fusions": sum(one.opcode == "fusion" for one in graph.operations),
        "peak_bytes": graph.peak_bytes,
        "unscoped_share": unscoped.bytes / total.bytes if total.bytes else 0.0,
    }


def _runs(graph: Graph) -> float:
    return sum(one.times for one in graph.operations if one.kind == COLLECTIVES)


def _finding(rule: str, one: Operation, remedy: str) -> Finding:
    name = f"{one.name} ({one.scope})" if one.scope else one.name
    return Finding(rule, name, one.layer_kind, f"{(one.copied or one.result_bytes) / 1e6:,.2f} MB", remedy)


def _widened(one: Operation, limit: float) -> bool:
    wide = one.shapes and one.shapes[0].startswith("f32[") and one.kind in (ELEMENTWISE, LAYOUT)
    written = sum(one.written.values())
    # Four bits become eight times as many; more is something else that a small weight takes part in.
    return bool(wide and one.weights and limit < written <= 8 * one.read.get("weights", 0.0))


def _laid_out(one: Operation, limit: float) -> bool:
    return bool(one.kind == LAYOUT and one.weights and not one.copied and sum(one.written.values()) > limit)


def _calls_host(one: Operation, limit: float) -> bool:
    return one.opcode.removesuffix("-done") in HOST or bool(one.target and CALLBACKS.fullmatch(one.target))


def _unlisted(one: Operation, limit: float) -> bool:
    return bool(one.target and not LISTED.fullmatch(one.target) and not CALLBACKS.fullmatch(one.target))


def _dynamic(one: Operation, limit: float) -> bool:
    return any("<=" in shape or "?" in shape for shape in one.shapes)


# By rule: whether an operation breaks it at a limit, and the remedy.
OF_OPERATIONS: dict[str, tuple[Callable[[Operation, float], bool], Callable[[Operation], str]]] = {
    "fp32-weights": (_widened, lambda one: f"multiply {one.weights[0]} in the dtype that it has"),
    "large-copy": (lambda one, limit: one.copied > limit, lambda one: "donate the buffer, or write in place"),
    "weight-layout": (_laid_out, lambda one: f"store {one.weights[0]} in the layout that is read"),
    "host-callback": (_calls_host, lambda one: "remove the callback from the model"),
    "custom-call": (_unlisted, lambda one: f"list {one.target} if it is wanted"),
    "dynamic-shape": (_dynamic, lambda one: "give the operation a fixed shape"),
}


def _of_program(graph: Graph, expected: Expected, limits: Budgets) -> Iterator[Finding]:
    """The broken rules that no single operation breaks."""
    if (limit := limits.limit("large-constant")) is not None:
        for name, count in graph.constants.items():
            if count > limit:
                yield Finding("large-constant", name, None, f"{count / 1e6:,.2f} MB", "make it an argument")
    if limits.limit("state-donation") is not None and graph.form == "optimized":
        for name in expected.state:
            if name not in graph.aliased:
                yield Finding("state-donation", name, "state", "not aliased", "donate the state, and write it in place")
    limit, runs = limits.limit("collectives"), _runs(graph)
    if limit is not None and expected.collectives is not None and runs > expected.collectives + limit:
        amount = f"{runs:.0f} > {expected.collectives}"
        yield Finding("collectives", graph.cell, None, amount, "see graph summary --by part for where they are")
    limit, flops = limits.limit("extra-flops"), graph.totals().flops
    if limit is not None and expected.flops and flops > limit * expected.flops:
        amount = f"{flops / 1e9:.3f} GFLOP, {flops / expected.flops:.1f} times what the tokens need"
        yield Finding("extra-flops", graph.cell, None, amount, "choose a padding nearer to the tokens of a call")


def document(findings: Mapping[str, list[Finding]]) -> dict[str, Any]:
    """Findings by cell as JSON values, by the schema ``SCHEMA``."""
    cells = {cell: [vars(finding) for finding in group] for cell, group in findings.items()}
    return {"schema": SCHEMA, "clean": not any(findings.values()), "cells": cells}


def table(findings: Mapping[str, list[Finding]]) -> list[str]:
    """Findings by cell for a person."""
    lines = []
    for cell, group in findings.items():
        if not group:
            continue
        rows = [
            {"rule": one.rule, "layer kind": one.layer_kind or "-", "amount": one.amount, "where": one.subject}
            for one in group
        ]
        remedies = dict.fromkeys(f"{one.rule}: {one.remedy}" for one in group)
        lines += [cell, *selected(rows, list(rows[0])), *footnotes(remedies), ""]
    clean = [cell for cell, group in findings.items() if not group]
    return [*lines, f"clean: {listed(clean, 100)}" if clean else "no cell is clean"]

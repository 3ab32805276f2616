"""``ling3export plan``: what a build would make, and whether the machines hold it, without compiling anything.

Weights, state and floors follow from the configuration by formula. Temporaries only the compiler knows: they come from
an artifact that was built alike, or are said to be unknown.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import read_manifest
from ling3export.cost.estimates import passing
from ling3export.cost.roofline import Workload, roofline_bound
from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK
from ling3export.plan.options import Options, spelled
from ling3export.plan.paddings import (
    Histogram,
    Length,
    best_paddings,
    decode_waste,
    grid,
    prefill_waste,
    split_by_context,
)
from ling3export.plan.plan import Plan, make_plans
from ling3export.pricing.memory import held
from ling3export.pricing.recorded import layout_difference


def config_of(path: Path, ignore: Sequence[str]) -> Config:
    """The configuration of a checkpoint's folder, or of a config.json itself.

    Raises:
        ConfigError: There is none, or not one that we model.
    """
    return Config.from_file(path / "config.json" if path.is_dir() else path, ignore)


def planned(
    config: Config, options: Options, lengths: Sequence[Length] = (), artifact: Path | None = None,
    ignore: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Everything that ``plan`` prints, as JSON.

    Args:
        config: The model.
        options: As of a build.
        lengths: A histogram of requests; empty for none.
        artifact: Compiled for the same plan: gives temporaries and times.
        ignore: Fields of config.json that were ignored, for the command that is recommended.

    Raises:
        PlanError: The plan cannot be built.
        ArtifactError: ``artifact`` is none.
    """
    plans = make_plans(config, options)
    manifest = None if artifact is None else read_manifest(artifact)
    record: dict[str, Any] = {
        "dtype": options.dtype,
        "paddings": list(plans[0].paddings),
        "decode_paddings": list(plans[0].decode_paddings),
        "score_paddings": list(plans[0].score_paddings),
        "context": plans[0].context,
        "targets": {plan.target.name: _target(config, plan, manifest) for plan in plans},
    }
    if lengths:
        record["lengths"] = _lengths(lengths, plans[0], options, ignore)
    return record


def _target(config: Config, plan: Plan, manifest: dict[str, Any] | None) -> dict[str, Any]:
    cells, unknown = _compiled(config, plan, manifest)
    found = held(config, plan, cells)
    chip, geometry = plan.target.chip, plan.geometry
    workload = Workload(min(Workload.tokens, plan.context))
    rows = {}
    for cell in plan.cells:
        row: dict[str, Any] = {"floor": None, "temporaries": None, "estimated_seconds": None}
        if chip is not None:
            low = roofline_bound(config, geometry, cell.phase, cell.padding, chip, workload)
            moved = sum(low["bytes"].values())
            times = {"memory": moved / chip.bandwidth, "compute": low["flops"] / chip.flops}
            row["floor"] = low | {"memory_seconds": times["memory"], "compute_seconds": times["compute"]}
        if cells is not None:
            row["temporaries"] = passing(cells[cell.name]["memory"])
            row["estimated_seconds"] = cells[cell.name].get("estimated_seconds")
        rows[cell.name] = row
    return {
        "target": plan.target.text,
        "tp": plan.target.tp,
        "hosts": plan.target.processes,
        "notes": list(plan.notes),
        "pool": {
            "slots": geometry.slots,
            "pages": geometry.pages,
            "page_size": geometry.page_size,
            "placement": geometry.placement,
            "tokens": geometry.pages * geometry.page_size,
        },
        "device": {
            "weights": found.weights,
            "state": found.state,
            "temporaries": found.temporaries,
            "programs": found.programs,
            "total": found.total,
            "memory": found.memory,
        },
        "unknown": unknown,
        "tokens_a_sequence": workload.tokens,
        "cells": rows,
    }


def _compiled(
    config: Config, plan: Plan, manifest: dict[str, Any] | None
) -> tuple[dict[str, dict[str, Any]] | None, str | None]:
    """The records of every cell of an artifact that was built alike; None, and why."""
    if manifest is None:
        return None, "unknown until compiled (--from ARTIFACT takes them from one that was built alike)"
    if difference := layout_difference(config, plan, manifest):
        return None, f"unknown: the artifact of --from has {difference}"
    cells = manifest["targets"][plan.target.name]["cells"]
    return {cell.name: cells[cell.name] for cell in plan.cells}, None


def _lengths(lengths: Sequence[Length], plan: Plan, options: Options, ignore: Sequence[str]) -> dict[str, Any]:
    fits, refused = split_by_context(lengths, plan.context)
    record: dict[str, Any] = {"requests": sum(length.count for length in fits), "refused": refused}
    if not fits:
        return record
    record |= {
        "prefill": prefill_waste(fits, plan.paddings),
        "decode": decode_waste(fits, plan.decode_paddings, plan.geometry.slots),
        "better": None,
    }
    largest = plan.paddings[-1]
    best = best_paddings(fits, len(plan.paddings), largest)
    histogram = Histogram(fits, largest)
    if best is not None and histogram.cost(best) < histogram.cost(plan.paddings):
        record["better"] = {
            "paddings": list(best),
            "exact": grid(len(plan.paddings), largest) == CHUNK,
            "prefill": prefill_waste(fits, best),
            # Decode's paddings would follow prefill's: they are pinned to what they are.
            "options": spelled(replace(options, paddings=best, decode_paddings=plan.decode_paddings), ignore),
        }
    return record

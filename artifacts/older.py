"""Manifests that earlier versions wrote, as format 2 has them today: format 1, and phases under their earlier names.

Nothing else knows either.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from ling3export.artifacts.records import CANONICAL, laid_out

RENAMED = {"adjust": "logits_processor", "fetch": "offload", "store": "onload", "slice": "offload_group"}
EARLIER = re.compile(rb'"phase": "(adjust|fetch|store|slice)"')


def with_phases_of_today(raw: dict[str, Any]) -> dict[str, Any]:
    """A manifest with today's names of phases, in its cells and in what was measured of them; files keep their names.

    Args:
        raw: Plain JSON, unchecked.
    """
    return {key: _with_today(value) if key in ("targets", "vectors") else value for key, value in raw.items()}


def _with_today(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_today(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {_name_of_today(key): _with_today(item) for key, item in value.items()}
    if isinstance(phase := found.get("phase"), str):
        found["phase"] = _name_of_today(phase)
    return found


def _name_of_today(name: str) -> str:
    """A phase, or a cell, which is called by its phase and its padding: ``adjust@16`` is ``logits_processor@16``."""
    phase, at, padding = name.partition("@")
    return f"{RENAMED.get(phase, phase)}{at}{padding}"


def check_bytes(raw: dict[str, Any], data: bytes) -> None:
    """Whether ``data`` is spelled as format 1 was, and its digest is that of the other fields' canonical JSON.

    Raises:
        ValueError: It is not; what was expected, and found.
    """
    try:
        exact = (laid_out(raw) + "\n").encode() == data
        others = {key: value for key, value in raw.items() if key != "sha256"}
        digest = hashlib.sha256(CANONICAL.encode(others).encode()).hexdigest()
    except ValueError:  # a lone surrogate, or a number that is infinite
        exact, digest = False, ""
    if not exact:
        raise ValueError("expected the spacing and spelling of a build, found another")
    if raw.get("sha256") != digest:
        raise ValueError(f"expected sha256 {raw.get('sha256')}, found {digest}")


def upgraded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of format 2, as plain JSON, unchecked.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: ``raw`` is not what a build of format 1 wrote.
    """
    plan, weights, vectors = raw["plan"], raw["weights"], dict(raw["vectors"])
    names = ("paddings", "decode_paddings", "max_running", "page_size", "context", "dtype", "memory_fraction")
    vectors["margins"] = _given(vectors["margins"])
    vectors["receipts"] = {name: _given(each, without=("passed",)) for name, each in vectors["receipts"].items()}
    return {
        "producer": raw["producer"],
        "source": raw["source"],
        "config": raw["config"],
        "plan": {name: plan[name] for name in (*names, "state_memory")},
        "targets": {name: _target(target) for name, target in raw["targets"].items()},
        "weights": {
            "files": {f"weights/{name}": file["bytes"] for name, file in weights["files"].items()},
            "index": {
                name: {**tensor, "file": f"weights/{tensor['file']}"}
                for name, tensor in raw["weights"]["index"].items()
            },
        },
        "vectors": vectors,
        "tokenizer": raw["tokenizer"],
        "notes": raw["notes"],
        "sha256": raw["sha256"],
    }


def _given(row: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Without what is null: format 2 leaves it out."""
    return {key: value for key, value in row.items() if value is not None and key not in without}


def _target(raw: Mapping[str, Any]) -> dict[str, Any]:
    devices = raw["mesh"]["devices"]
    hosts = {device: number for number, ids in enumerate(raw.get("hosts", [devices])) for device in ids}
    state = dict(raw["state"])
    state["arrays"] = [{key: value for key, value in row.items() if key != "split"} for row in state["arrays"]]
    names = ("platform", "kind", "topology", "toolchain", "fingerprint", "state_abi", "geometry", "parameters")
    requires = {key: value for key, value in raw["requires"].items() if key not in ("devices", "processes")}
    return {
        **_given({name: raw[name] for name in names}),
        "mesh": {**raw["mesh"], "hosts": [hosts[device] for device in devices]},
        "requires": requires,
        "state": state,
        "cells": {name: _cell(cell) for name, cell in raw["cells"].items()},
    }


def _cell(raw: Mapping[str, Any]) -> dict[str, Any]:
    cell = _given(raw, without=("rows", "packed", "donated", "estimated_seconds", "hosts", "requires"))
    cell["collectives"] = {
        kind: found if isinstance(found, dict) else {"count": found} for kind, found in raw["collectives"].items()
    }
    cell["call"] = {key: raw["call"][key] for key in ("inputs", "outputs", "custom_calls")}
    if "estimate" in cell:
        estimate = _given(raw["estimate"], without=("collectives",))
        estimate["loops"] = [_renamed(loop) for loop in estimate["loops"]]
        cell["estimate"] = {"by_kind": {}, **estimate}
    if "origin" in cell:
        cell["origin"] = _renamed(raw["origin"])
    return cell


def _renamed(row: Mapping[str, Any]) -> dict[str, Any]:
    """``from`` became ``source``."""
    return {"source" if key == "from" else key: value for key, value in row.items()}

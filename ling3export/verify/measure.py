"""How far a target's cells are from the stored expectations of an artifact's vectors: the receipts.

A target is measured in a process of its own: the number of devices is fixed when jax starts.
"""

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import read_checked
from ling3export.errors import ArtifactError, Ling3Error
from ling3export.processes import LOOPBACK, START_TIMEOUT, Child, Parent, free_port
from ling3export.runners.hosts.hosts import Hosts
from ling3export.verify.prober import Prober
from ling3export.verify.receipts import TOLERANCES, Logits, agreement, logits_receipt, score_receipt, tokens_receipt

MODULE = "ling3export.verify.measure"


def measure_target(artifact: Path, name: str, manifest: dict[str, Any], hosts: Hosts | None = None) -> dict[str, Any]:
    """Loads one target and runs every vector through each of its cells.

    On several hosts every process calls it; the result of the first one counts.

    Returns:
        ``cells``: by name the errors and a status; ``agreement``: the largest relative distance between cells;
        ``passed``.
    """
    from safetensors.numpy import load

    from ling3export.runners.load.loader import load as load_artifact

    loaded = load_artifact(
        artifact, target=name, check="programs", report=lambda _: None, manifest=manifest, hosts=hosts
    )
    target = loaded.record
    vectors = manifest["vectors"]
    stored = load(read_checked(artifact, vectors["expected"]))
    expected: Logits = {
        (index, position): stored[sequence["logits"]][row]
        for index, sequence in enumerate(vectors["sequences"])
        for row, position in enumerate(sequence["positions"])
    }
    prober = Prober(loaded.runner, target, vectors["sequences"])
    found = _probe(prober, target, len(vectors["sequences"]))
    dtype = manifest["plan"]["dtype"]
    cells = {cell: logits_receipt(values, expected, dtype) for cell, values in found.items()}
    for cell, record in target["cells"].items():
        if record["phase"] == "sample":
            cells[cell] = _sampled(prober, target, record["padding"])
        if record["phase"] == "score":
            cells[cell] = _scored(prober, record["padding"], vectors["sequences"], expected, dtype)
    measure, bound = TOLERANCES[dtype]
    if loaded.channel is not None:
        loaded.channel.finish()
    return {
        "tolerance": {"measure": measure, "bound": bound},
        "cells": cells,
        "agreement": agreement(found),
        "passed": all(row["status"] == "passed" for row in cells.values()),
    }


def _probe(prober: Prober, target: dict[str, Any], count: int) -> dict[str, Logits]:
    found: dict[str, Logits] = {}
    paddings = sorted(record["padding"] for record in target["cells"].values() if record["phase"] == "prefill")
    for padding in paddings:
        values = found.setdefault(f"prefill@{padding}", {})
        for sequence in range(count):
            values |= dict(prober.prefill(padding, sequence, 1))
    for cell, record in target["cells"].items():
        if record["phase"] == "decode":
            found[cell] = prober.decode(record["padding"], paddings[0])
    return found


def _sampled(prober: Prober, target: dict[str, Any], rows: int) -> dict[str, Any]:
    giver = next(cell for cell in target["cells"].values() if cell["phase"] != "sample" and cell["rows"] == rows)
    return tokens_receipt(*prober.sample(giver["phase"], giver["padding"], rows))


def _scored(
    prober: Prober, padding: int, sequences: list[dict[str, Any]], expected: Logits, dtype: str
) -> dict[str, Any]:
    scored = [prober.score(padding, number) for number in range(len(sequences))]
    found = {(number, at): row for number, said in enumerate(scored) for at, row in said.logits.items()}
    return score_receipt(logits_receipt(found, expected, dtype), scored, sequences, expected, *TOLERANCES[dtype])


def measure_apart(artifact: Path, target: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """:func:`measure_target` in a fresh process; of several hosts, in one each.

    The manifest goes through a pipe: a build has none in the folder before its receipts are in it.

    Raises:
        ArtifactError: The first process ended without a result; with what it said. It tells what went wrong with the
            others, too.
    """
    count = manifest["targets"].get(target, {"processes": 1})["processes"]
    address = f"{LOOPBACK}:{free_port()}"
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(MODULE)) for _ in range(count)]
        for number, child in enumerate(children):
            hosts = asdict(Hosts(address, count, number, START_TIMEOUT)) if count > 1 else None
            child.send({"artifact": str(artifact), "target": target, "manifest": manifest, "hosts": hosts})
        reply = children[0].receive()
        if reply is not None and "receipts" in reply:
            return dict(reply["receipts"])
        said = f"a process that {children[0].ended()[1]}" if reply is None else reply["refused"]
    raise ArtifactError(f"vectors of `{target}`: expected to run, found: {said}")


def main() -> None:
    """Measures one target for the process that started this one."""
    parent = Parent()
    job = parent.receive()
    try:
        hosts = None if job["hosts"] is None else Hosts(**job["hosts"])
        parent.send({"receipts": measure_target(Path(job["artifact"]), job["target"], job["manifest"], hosts)})
    except Ling3Error as error:
        parent.send({"refused": str(error)})


if __name__ == "__main__":
    main()

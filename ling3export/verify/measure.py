"""How far a target's cells are from the stored expectations of an artifact's vectors: the receipts.

``python -m ling3export.verify.measure ARTIFACT TARGET < MANIFEST`` measures one target in a process of its own
(the number of devices is fixed when jax starts) and prints one JSON object;
``ling3export verify`` and the build read it.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import read_checked
from ling3export.compile.peers import HOST, TIMEOUT, free_port
from ling3export.errors import ArtifactError, Ling3Error
from ling3export.processes import command, ending, environment
from ling3export.runners.hosts.hosts import Hosts
from ling3export.verify.prober import Prober
from ling3export.verify.receipts import TOLERANCES, Logits, agreement, logits_receipt, score_receipt, tokens_receipt

REFUSED = 3  # how the measuring process ends with a message for the user; 1 is a traceback


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
    prober = Prober(loaded.device, target, vectors["sequences"])
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
    """:func:`measure_target` in a fresh process.

    The manifest goes through its stdin: a build has none in the folder before its receipts are in it.

    Raises:
        ArtifactError: It ended without a result; with what it said.
    """
    started = command("ling3export.verify.measure", str(artifact), target)
    with contextlib.ExitStack() as stack:
        count = manifest["targets"].get(target, {"processes": 1})["processes"]
        if count > 1:
            started += [f"{HOST}:{free_port()}", str(count)]
            for number in range(1, count):
                stack.enter_context(_other(started, number, manifest))
        done = subprocess.run(
            [*started, *(["0"] if count > 1 else [])], input=json.dumps(manifest), capture_output=True, text=True,
            errors="replace", env=environment(), check=False,
        )  # fmt: skip
    if done.returncode or not done.stdout.strip():
        said = done.stderr.strip()[-1500:] or "nothing was printed"
        if done.returncode != REFUSED:
            said = f"a process that {ending(done.returncode)}: {said}"
        raise ArtifactError(f"vectors of `{target}`: expected to run, found: {said}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


@contextlib.contextmanager
def _other(started: list[str], number: int, manifest: dict[str, Any]) -> Iterator[None]:
    """Another host's process within the block; the first one tells what went wrong with it."""
    process = subprocess.Popen(
        [*started, str(number)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True,
        env=environment(),
    )  # fmt: skip
    try:
        assert process.stdin is not None
        with contextlib.suppress(OSError), process.stdin:
            process.stdin.write(json.dumps(manifest))
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Prints the receipts of one target as JSON."""
    try:
        hosts = Hosts(sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), TIMEOUT) if len(sys.argv) > 3 else None
        print(json.dumps(measure_target(Path(sys.argv[1]), sys.argv[2], json.load(sys.stdin), hosts)))
    except Ling3Error as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main()

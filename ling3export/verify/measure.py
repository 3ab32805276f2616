"""How far a target's cells are from the stored expectations of an artifact's vectors: the receipts.

A target is measured in a process of its own: the number of devices is fixed when jax starts.
"""

import contextlib
import secrets
from dataclasses import asdict
from pathlib import Path

from ling3export.artifacts.manifest import read_checked
from ling3export.artifacts.records import from_json, to_json
from ling3export.artifacts.schema import MOVING, SPLIT, Cell, Manifest, Receipts, Target
from ling3export.errors import ArtifactError, Ling3Error
from ling3export.processes import LOOPBACK, START_TIMEOUT, Child, Parent, free_port
from ling3export.runners.hosts.hosts import Hosts
from ling3export.verify.prober import Prober
from ling3export.verify.receipts import TOLERANCES, Logits, agreement, exact_receipt, logits_receipt, score_receipt

MODULE = "ling3export.verify.measure"


def measure_target(artifact: Path, name: str, manifest: Manifest, hosts: Hosts | None = None) -> Receipts:
    """Loads one target and runs every vector through each of its cells.

    On several hosts every process calls it; the result of the first one counts.
    """
    from safetensors.numpy import load

    from ling3export.runners.load.loader import load as load_artifact

    loaded = load_artifact(
        artifact, target=name, check="programs", report=lambda _: None, manifest=manifest, hosts=hosts
    )
    target, vectors, tolerance = loaded.record, manifest.vectors, TOLERANCES[manifest.plan.dtype]
    assert vectors.expected is not None  # where there are weights, as the loader found
    stored = load(read_checked(artifact, vectors.expected))
    expected: Logits = {
        (index, position): stored[sequence.logits][row]
        for index, sequence in enumerate(vectors.sequences)
        for row, position in enumerate(sequence.positions)
    }
    prober = Prober(loaded.runner, target, vectors.sequences)
    found: dict[str, Logits] = {}
    cut: dict[tuple[int, int], Logits] = {}  # by the paddings of attend and dispatch
    receipts = {}
    for cell in sorted(target.cells.values(), key=lambda cell: cell.padding):
        if cell.phase == "sample":
            receipts[cell.name] = exact_receipt(*prober.sample(cell.padding))
        elif cell.phase == "adjust":
            receipts[cell.name] = exact_receipt(*prober.adjust(cell.padding))
        elif cell.phase in MOVING:
            receipts[cell.name] = exact_receipt(*prober.moved(cell.phase))
        elif cell.phase == "score":
            scored = [prober.score(cell.padding, number) for number in range(len(vectors.sequences))]
            receipts[cell.name] = score_receipt(scored, vectors.sequences, expected, tolerance)
        elif cell.phase in SPLIT:
            at = split_of(target, cell)
            if at not in cut:
                cut[at] = prober.split(manifest, *at)
            receipts[cell.name] = logits_receipt(cut[at], expected, tolerance)
        else:
            logits = prober.prompts(cell.padding) if cell.phase == "prefill" else prober.decode(cell.padding)
            found[cell.name] = logits
            receipts[cell.name] = logits_receipt(logits, expected, tolerance)
    if loaded.channel is not None:
        loaded.channel.finish()
    return Receipts(tolerance, receipts, agreement(found, cut))


def split_of(target: Target, cell: Cell) -> tuple[int, int]:
    """The paddings of attend and dispatch that a split cell is run with: its own, and the nearest other that fits."""
    sizes, pairs = target.paddings("attend"), target.paddings("dispatch")
    chosen = next(leaf.shape[1] for leaf in target.cells[f"attend@{sizes[0]}"].outputs if leaf.name == "expert_ids")
    if cell.phase in ("dispatch", "experts"):
        return max(size for size in sizes if size * chosen <= cell.padding), cell.padding
    return cell.padding, min(each for each in pairs if cell.padding * chosen <= each)


def measure_apart(artifact: Path, target: str, manifest: Manifest) -> Receipts:
    """:func:`measure_target` in a fresh process; of several hosts, in one each.

    The manifest goes through a pipe: a build has none in the folder before its receipts are in it.

    Raises:
        ArtifactError: The first process ended without a result; with what it said. It tells what went wrong with the
            others, too.
    """
    count = manifest.targets[target].processes if target in manifest.targets else 1
    address = f"{LOOPBACK}:{free_port()}"
    secret = secrets.token_hex(16)  # of these processes alone, among all of this machine
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(MODULE)) for _ in range(count)]
        for number, child in enumerate(children):
            hosts = asdict(Hosts(address, count, number, START_TIMEOUT, secret=secret)) if count > 1 else None
            child.send({"artifact": str(artifact), "target": target, "manifest": to_json(manifest), "hosts": hosts})
        reply = children[0].receive()
        if reply is not None and "receipts" in reply:
            return from_json(Receipts, reply["receipts"])
        said = f"a process that {children[0].ended()[1]}" if reply is None else reply["refused"]
    raise ArtifactError(f"vectors of `{target}`: expected to run, found: {said}")


def main() -> None:
    """Measures one target for the process that started this one."""
    parent = Parent()
    job = parent.receive()
    try:
        hosts = None if job["hosts"] is None else Hosts(**job["hosts"])
        manifest = from_json(Manifest, job["manifest"])
        parent.send({"receipts": to_json(measure_target(Path(job["artifact"]), job["target"], manifest, hosts))})
    except Ling3Error as error:
        parent.send({"refused": str(error)})


if __name__ == "__main__":
    main()

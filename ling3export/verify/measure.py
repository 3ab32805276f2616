"""How far a target's cells are from the stored expectations of an artifact's vectors: the receipts.

A target is measured in a process of its own: the number of devices is fixed when jax starts.
"""

import contextlib
import os
import secrets
from dataclasses import asdict
from pathlib import Path

from ling3export.artifacts.records import from_json, to_json
from ling3export.artifacts.schema import Manifest, PortableReceipts, Receipts
from ling3export.foundation.errors import ArtifactError, Ling3Error, MisfitError
from ling3export.foundation.processes import LOOPBACK, START_TIMEOUT, Child, Parent, free_port
from ling3export.runners.hosts.hosts import Hosts
from ling3export.verify.portable import measure_portable

MODULE = "ling3export.verify.measure"
# Portable programs are run a few times: compiling them with LLVM's optimization would take twice as long.
QUICK = "--xla_backend_optimization_level=0"


def measure_target(artifact: Path, name: str, manifest: Manifest, hosts: Hosts | None = None) -> Receipts:
    """Loads one target and runs every vector through each of its cells.

    On several hosts every process calls it; the result of the first one counts.
    """
    from ling3export.runners.calibrate.vectors import measured
    from ling3export.runners.load.loader import load

    loaded = load(artifact, target=name, check="programs", report=lambda _: None, manifest=manifest, hosts=hosts)
    receipts = measured(loaded)
    if loaded.channel is not None:
        loaded.channel.finish()
    return receipts


def measure_apart(artifact: Path, target: str, manifest: Manifest, *, portable: bool = False) -> Receipts:
    """:func:`measure_target` in a fresh process; of several hosts, in one each. Or ``measure_portable``, in one.

    The manifest goes through a pipe: a build has none in the folder before its receipts are in it.

    Raises:
        MisfitError: The programs do not fit this machine.
        ArtifactError: The first process ended without a result; with what it said. It tells what went wrong with the
            others, too.
    """
    count = manifest.targets[target].processes if target in manifest.targets and not portable else 1
    address = f"{LOOPBACK}:{free_port()}"
    secret = secrets.token_hex(16)  # of these processes alone, among all of this machine
    job = {"artifact": str(artifact), "target": target, "manifest": to_json(manifest), "portable": portable}
    with contextlib.ExitStack() as stack:
        flags = os.environ.get("XLA_FLAGS", "").strip()
        quick = portable and flags[:1] in ("", "-")  # anything else is the name of a file
        variables = {"XLA_FLAGS": f"{flags} {QUICK}".strip()} if quick else {}
        children = [stack.enter_context(Child(MODULE, variables)) for _ in range(count)]
        for number, child in enumerate(children):
            hosts = asdict(Hosts(address, count, number, START_TIMEOUT, secret=secret)) if count > 1 else None
            child.send(job | {"hosts": hosts})
        reply = children[0].receive()
        if reply is not None and "receipts" in reply:
            return from_json(PortableReceipts if portable else Receipts, reply["receipts"])
        said = f"a process that {children[0].ended()[1]}" if reply is None else reply["refused"]
    kind = MisfitError if reply is not None and reply["misfit"] else ArtifactError
    raise kind(f"vectors of `{target}`: expected to run, found: {said}")


def main() -> None:
    """Measures one target for the process that started this one."""
    parent = Parent()
    job = parent.receive()
    try:
        manifest, folder, name = from_json(Manifest, job["manifest"]), Path(job["artifact"]), job["target"]
        if job["portable"]:
            found: Receipts = measure_portable(folder, name, manifest)
        else:
            hosts = None if job["hosts"] is None else Hosts(**job["hosts"])
            found = measure_target(folder, name, manifest, hosts)
        parent.send({"receipts": to_json(found)})
    except Ling3Error as error:
        parent.send({"refused": str(error), "misfit": isinstance(error, MisfitError)})


if __name__ == "__main__":
    main()

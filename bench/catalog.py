"""Bytes that pulls move: ``python -m bench catalog FIRST [PROGRAMS WEIGHTS]``.

The artifacts are published one after the other into a layout in a folder and pulled with one folder of kept files.
"""

import tempfile
from pathlib import Path

from bench.report import machine, show, table
from ling3export.artifacts.catalog.layout import OciLayout
from ling3export.artifacts.catalog.publish import Words, publish
from ling3export.artifacts.catalog.pull import pull
from ling3export.artifacts.catalog.stores import resolve
from ling3export.artifacts.manifest import read_manifest

ID = "measured"
Row = dict[str, str | int]


def main(first: Path, programs: Path | None, weights: Path | None, hosts: Path | None) -> None:
    """Prints what each version moves, after those before it, and what each host of a target of several."""
    rows: list[Row] = []
    given = {"first pull": first, "other programs, same weights": programs, "other weights, same programs": weights}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = OciLayout(folder / "store")
        for number, (what, artifact) in enumerate(given.items()):
            if artifact is not None:
                published = publish(artifact, store, ID, f"1.{number}.0", Words()).moved
                rows.append(pulled(what, artifact, published, store, folder / f"out-{number}", folder / "kept"))
        if hosts is not None:
            store = OciLayout(folder / "hosts")
            published = publish(hosts, store, ID, "1.0.0", Words()).moved
            for name, target in read_manifest(hosts).targets.items():
                for host in range(target.mesh.processes):
                    to, kept = folder / f"{name}-{host}", folder / f"kept-{name}-{host}"
                    rows.append(pulled(f"host {host} of {name}", hosts, published, store, to, kept, name, host))
    head = ("bytes", "of files", "published", "pulled", "there")
    show("Catalogue: bytes moved", [table(head, [[*row.values()] for row in rows])], machine() | {"moved": rows})


def pulled(
    what: str,
    artifact: Path,
    published: int,
    store: OciLayout,
    to: Path,
    kept: Path,
    target: str | None = None,
    host: int | None = None,
) -> Row:
    """What a pull of the newest version moves."""
    found = resolve(store, ID)
    moved = pull(store, found, to, kept, target=target, host=host)
    size = sum(path.stat().st_size for path in artifact.rglob("*") if path.is_file())
    return {"what": what, "files": size, "published": published, "pulled": moved.pulled, "here": moved.here}

"""Bytes that pulls move: ``python -m bench catalog FIRST [PROGRAMS WEIGHTS]``.

The artifacts are published one after the other into a layout in a folder and pulled with one folder of kept files.
"""

import tempfile
from pathlib import Path

from bench.report import machine, show, table
from ling3export.artifacts.catalog.layout import OciLayout
from ling3export.artifacts.catalog.publish import Words, publish
from ling3export.artifacts.catalog.pull import pull, resolve
from ling3export.artifacts.manifest import read_manifest

ID = "measured"
Row = dict[str, str | int]


def main(first: Path, programs: Path | None, weights: Path | None, hosts: Path | None) -> None:
    """Prints what each version moves, after those before it, and what each host of a target of several."""
    rows: list[Row] = []
    given = {"first pull": first, "other programs, same weights": programs, "other weights, same programs": weights}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = Layout(folder / "store")
        for number, (what, artifact) in enumerate(given.items()):
            if artifact is not None:
                published = publish(artifact, store, ID, f"1.{number}.0", Words()).moved
                rows.append(pulled(what, artifact, published, store, folder / f"out-{number}", folder / "kept"))
        if hosts is not None:
            store = Layout(folder / "hosts")
            published = publish(hosts, store, ID, "1.0.0", Words()).moved
            for name, target in read_manifest(hosts).targets.items():
                for host in range(target.mesh.processes):
                    to, kept = folder / f"{name}-{host}", folder / f"kept-{name}-{host}"
                    rows.append(pulled(f"host {host} of {name}", hosts, published, store, to, kept, name, host))
    head = ("bytes", "of files", "published", "pulled", "there")
    show("Catalogue: bytes moved", [table(head, [[*row.values()] for row in rows])], machine() | {"moved": rows})


<<<<<<< HEAD
def pulled(
    what: str,
    artifact: Path,
    published: int,
    store: Layout,
    to: Path,
    kept: Path,
    target: str | None = None,
    host: int | None = None,
) -> Row:
    """What a pull of the newest version moves."""
    *_, found = resolve(store, ID, None)
    moved = pull(store, found, to, kept, target=target, host=host)
    size = sum(path.stat().st_size for path in artifact.rglob("*") if path.is_file())
    return {"what": what, "files": size, "published": published, "pulled": moved.pulled, "here": moved.here}
=======
def row(what: str, artifact: Path, published: int, found: Moved) -> dict[str, str | int]:
    size = sum(path.stat().st_size for path in artifact.rglob("*") if path.is_file())
    return {"what": what, "files": size, "published": published, "pulled": found.pulled, "here": found.here}


def pulled(store: OciLayout, to: Path, blobs: Path, target: str | None = None, host: int | None = None) -> Moved:
    *_, found = resolve(store, ID, None)
    return pull(store, found, to, blobs, target=target, host=host)


def moved(folder: Path, versions: dict[str, Path]) -> list[dict[str, str | int]]:
    """What each version moves, after those before it."""
    store, rows = OciLayout(folder / "store"), []
    for number, (what, artifact) in enumerate(versions.items()):
        done = publish(artifact, store, ID, f"1.{number}.0", Words())
        rows.append(row(what, artifact, done.moved, pulled(store, folder / f"out-{number}", folder / "kept")))
    return rows


def shares(folder: Path, artifact: Path) -> list[dict[str, str | int]]:
    """What each host of a target of several moves."""
    store, rows = OciLayout(folder / "hosts"), []
    done = publish(artifact, store, ID, "1.0.0", Words())
    for name, target in read_manifest(artifact).targets.items():
        for host in range(target.mesh.processes):
            found = pulled(store, folder / f"{name}-{host}", folder / f"kept-{name}-{host}", name, host)
            rows.append(row(f"host {host} of {name}", artifact, done.moved, found))
    return rows


def timed(folder: Path, artifact: Path, rounds: int, megabytes: int) -> dict[str, list[float]]:
    """Seconds of copies and pulls, in turns, from files that are in memory."""
    store, source = OciLayout(folder / "large"), padded(artifact, folder / "padded", megabytes)
    publish(source, store, ID, "1.0.0", Words())

    def copied() -> None:
        shutil.copytree(source, folder / "copy")
        sync_tree(folder / "copy")

    ways: dict[str, Callable[[], object]] = {
        "copy": copied,
        "pull": lambda: pulled(store, folder / "pull", folder / "blobs"),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, does in ways.items():
            os.sync()
            started = time.perf_counter()
            does()
            found[way].append(time.perf_counter() - started)
            for left in ("copy", "pull", "blobs"):
                shutil.rmtree(folder / left, ignore_errors=True)
    return found


def padded(artifact: Path, folder: Path, megabytes: int) -> Path:
    """The artifact with so many more bytes of weights, in four files."""
    shutil.copytree(artifact, folder)
    manifest, rng = read_manifest(folder), np.random.default_rng(0)
    specs = {
        f"weights/more-{number}.safetensors": [TensorSpec(f"more.{number}", (megabytes << 16,), "F32")]
        for number in range(4)
    }
    with StoreWriter(folder, specs) as writer:
        for (spec,) in specs.values():
            writer.write(spec.name, rng.standard_normal(spec.shape, np.float32), slab=None)
        index = writer.finish()
    files = {path: (folder / path).stat().st_size for path in specs}
    weights = replace(manifest.weights, files=manifest.weights.files | files, index=manifest.weights.index | index)
    write_manifest(folder, replace(manifest, weights=weights))
    return folder
>>>>>>> 1a1c641 (Ask a registry once for a version, bound what it may answer, and remove yank, attached evaluations and held indexes)

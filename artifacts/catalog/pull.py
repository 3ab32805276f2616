"""From a version in a store to a folder: resumed after a break, every byte checked, there whole or not at all."""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling3export.artifacts.catalog.oci import Descriptor
from ling3export.artifacts.catalog.record import File
from ling3export.artifacts.catalog.slabs import Slab, begin, copied, holds, ranged, runs, slabs_of, tensors_of, write_at
from ling3export.artifacts.catalog.stores import ResolvedVersion
from ling3export.artifacts.files import link_or_copy, locked, refuse_links, remove, rename, writing
from ling3export.artifacts.manifest import MANIFEST, file_records, named_target
from ling3export.artifacts.schema import Manifest, StoredTensor
from ling3export.artifacts.share import write_share
from ling3export.artifacts.signing import SIGNATURES, read_trusted
from ling3export.artifacts.staging import staged
from ling3export.foundation.errors import CatalogError

if TYPE_CHECKING:
    from ling3export.artifacts.catalog.stores import Store

BLOCK = 1 << 20
PARALLEL = 4  # files at a time
TRIES = 5  # of one file, as long as each brings some bytes


class Moved:
    """Bytes of a pull, counted by several threads.

    Attributes:
        pulled: That came from the store.
        here: That were there already, from another version or from a pull that broke.
    """

    def __init__(self) -> None:
        self.pulled = self.here = 0
        self._lock = threading.Lock()

    def add(self, *, pulled: int = 0, here: int = 0) -> None:
        """Counts more of them."""
        with self._lock:
            self.pulled += pulled
            self.here += here


def pull(
    store: "Store",
    found: ResolvedVersion,
    to: Path,
    blobs: Path,
    *,
    target: str | None = None,
    host: int | None = None,
    force: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> Moved:
    """Pulls one version.

    The manifest comes first: where keys are trusted, nothing else does unless one of them has signed it.

    Args:
        store: Where it is.
        found: The version.
        to: The folder to make.
        blobs: A folder that keeps what was pulled, by digest; what is there already is not pulled again.
        target: Leave out the programs of all other targets of the manifest.
        host: Leave out the weights that this host of the target does not hold.
        force: Replace ``to`` if it is there.
        report: Told who signed it.

    Returns:
        How many bytes moved.

    Raises:
        CatalogError: A byte is not what the record says, or the store breaks off; a second call goes on from there.
        TrustError: It is not signed by a trusted key.
    """
    moved = Moved()
    refuse_links(blobs.parent, (blobs.name,))
    with writing(blobs):
        blobs.mkdir(parents=True, exist_ok=True)
    files = {file.path: file for file in found.record.files}
    with staged(to, force=force) as folder:
        manifest = pull_manifest(store, found, folder, blobs, moved, report)
        target = None if target is None else named_target(manifest.targets, target)
        wanted = _wanted(manifest, files, target, found)
        shared = {} if host is None else _shared(manifest, target, host, files, found)
        wanted = [file for file in wanted if host is None or file.path not in manifest.weights.files]
        if target is not None:
            needs = {name: sum(slab.stop - slab.start for slab in slabs) for name, slabs in shared.values()}
            check_room(found, blobs, folder, needs | {file.sha256: file.size for file in wanted})
        with ThreadPoolExecutor(PARALLEL) as pool:
            jobs: list[Callable[[], None]] = [
                partial(_fetch, store, file, found.layers[file.path], blobs, moved)
                for file in {file.sha256: file for file in wanted}.values()
            ]
            for path, (name, slabs) in shared.items():
                share = files[path], found.layers[path], blobs / name, moved, tensors_of(manifest, path), slabs
                jobs.append(partial(_fetch_share, store, *share))
            list(pool.map(lambda job: job(), jobs))  # the first error cancels what has not begun
        for file in wanted:
            link_or_copy(blobs / file.sha256, folder / file.path)
        for path, (name, _) in shared.items():
            link_or_copy(blobs / name, folder / path)
        if target is not None and host is not None:
            write_share(folder, target, host)
    return moved


def pull_manifest(
    store: "Store", found: ResolvedVersion, folder: Path, blobs: Path, moved: Moved, report: Callable[[str], None]
) -> Manifest:
    """Pulls the manifest of a version, and who signed it, into ``folder``, and reads it.

    Raises:
        CatalogError: It is not what the record says.
        TrustError: It is not signed by a trusted key.
    """
    for file in found.record.files:
        if file.path in (MANIFEST, SIGNATURES):
            _fetch(store, file, found.layers[file.path], blobs, moved)
            link_or_copy(blobs / file.sha256, folder / file.path)
    return read_trusted(folder, report, str(found.entry))


def check_room(found: ResolvedVersion, blobs: Path, folder: Path, needs: dict[str, int]) -> None:
    """Passes where the disk has room for what a version needs and is not there yet.

    Args:
        found: The version.
        blobs: Where its files are kept by digest.
        folder: Where they get their names; on another file system than ``blobs`` they are copied there.
        needs: Bytes of what it needs, by its name in ``blobs``.

    Raises:
        CatalogError: It has not.
    """
    missing = sum(max(0, size - _begun(blobs / name)) for name, size in needs.items() if not (blobs / name).is_file())
    kept, place = (next(each for each in (path, *path.absolute().parents) if each.is_dir()) for path in (blobs, folder))
    wanted = [(kept, missing)]
    if os.stat(kept).st_dev != os.stat(place).st_dev:
        wanted.append((place, sum(needs.values())))
    for where, size in wanted:
        if (free := shutil.disk_usage(where).free) < size:
            raise CatalogError(f"disk: expected {size:,} bytes free for {found.entry}, found {free:,}, in {where}")


def _begun(blob: Path) -> int:
    """Bytes on the disk of a blob that is not whole; holes do not count."""
    with suppress(FileNotFoundError):
        return os.stat(f"{blob}.partial").st_blocks * 512
    return 0


def _shared(
    manifest: Manifest, target: str | None, host: int, files: dict[str, File], found: ResolvedVersion
) -> dict[str, tuple[str, list[Slab]]]:
    """A host's slabs of each weight file, and what the file that has them alone is called among blobs.

    Raises:
        CatalogError: There is no such host, or a file is not as long as the manifest says.
    """
    if target is None or host >= (hosts := manifest.targets[target].mesh.processes):
        wanted = "a --target" if target is None else f"0 to {hosts - 1}"
        raise CatalogError(f"--host-id: expected {wanted}, found {host}, for {found.entry}")
    for path, size in manifest.weights.files.items():
        if files[path].size != size:
            raise CatalogError(f"file `{path}`: expected {size:,} bytes, found {files[path].size:,}, in {found.entry}")
    slabs = slabs_of(manifest, target, host)
    return {path: (f"{files[path].sha256}-{target}-{host}", slabs.get(path, [])) for path in manifest.weights.files}


def _wanted(manifest: Manifest, files: dict[str, File], target: str | None, found: ResolvedVersion) -> list[File]:
    """The files that a manifest names and that are to be pulled.

    Raises:
        CatalogError: The record has one of them not, or with another digest.
    """
    others = {file.path for name, each in manifest.targets.items() if target not in (None, name) for file in each.files}
    named = {record.path: record.sha256 for record in file_records(manifest)}
    named |= dict.fromkeys(manifest.weights.files, "")  # whose slabs have digests, which loading compares
    for path, digest in named.items():
        if path not in files or digest not in ("", files[path].sha256):
            raise CatalogError(
                f"file `{path}`: expected it in the record, too, found another or none, in {found.entry}"
            )
    return [files[path] for path in named if path not in others]


def _fetch(store: "Store", file: File, layers: list[Descriptor], blobs: Path, moved: Moved) -> None:
    """Brings a file's bytes to ``blobs``, under their digest."""
    blob = blobs / file.sha256
    if blob.is_file() and not blob.is_symlink() and blob.stat().st_size == file.size and _digest(blob) == file.sha256:
        moved.add(here=file.size)
        return
    with _partial(blob) as descriptor:
        if descriptor is None:  # another pull has brought it meanwhile
            moved.add(here=file.size)
            return
        digest, there = _resumed(descriptor, file.size)
        moved.add(here=there)
        for _ in range(TRIES):
            before = there
            with suppress(ConnectionError):
                for data in ranged(store, file, layers, there, file.size):
                    write_at(descriptor, data, there, file)
                    digest.update(data)
                    there += len(data)
                    moved.add(pulled=len(data))
            if there in (before, file.size):
                break
        if there != file.size:
            raise CatalogError(
                f"file `{file.path}`: expected {file.size:,} bytes, found {there:,}, then an end, in {store}",
                "the same command goes on from there",
            )
        if digest.hexdigest() != file.sha256:
            remove(Path(f"{blob}.partial"))
            raise CatalogError(
                f"file `{file.path}`: expected sha256 {file.sha256}, found {digest.hexdigest()}, in {store}",
                "the store is damaged, or what was pulled before: try again, then have it published again",
            )


def _fetch_share(
    store: "Store",
    file: File,
    layers: list[Descriptor],
    blob: Path,
    moved: Moved,
    tensors: dict[str, StoredTensor],
    slabs: list[Slab],
) -> None:
    """Brings a host's slabs of a weight file to ``blob``, each checked by its digest."""
    if blob.is_file() and not blob.is_symlink():
        with open(blob, "rb") as there:
            if all(holds(there.fileno(), slab) for slab in slabs):
                moved.add(here=sum(slab.stop - slab.start for slab in slabs))
                return
        remove(blob)  # of what it holds only a part is taken again
    with _partial(blob) as descriptor:
        if descriptor is None:
            return
        missing = begin(descriptor, file.size, tensors, slabs)
        moved.add(here=sum(slab.stop - slab.start for slab in slabs if slab not in missing))
        for run in runs(missing):
            for left in range(TRIES - 1, -1, -1):
                try:
                    data = ranged(store, file, layers, run[0].start, run[-1].stop)
                    for count in copied(data, descriptor, run, file, store):
                        moved.add(pulled=count)
                    break
                except ConnectionError as error:
                    if not left:
                        raise CatalogError(
                            f"file `{file.path}`: expected all of a range, found an end, in {store}: {error}",
                            "the same command goes on from there",
                        ) from error


@contextmanager
def _partial(blob: Path) -> Iterator[int | None]:
    """A descriptor of a blob that is not whole, for us alone, which has its name and is durable when the block ends
    well; None where it is whole by now."""
    path = Path(f"{blob}.partial")
    while True:
        with locked(path) as descriptor:
            if path.exists() and os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                yield descriptor
                os.fsync(descriptor)
                os.fchmod(descriptor, 0o444)
                rename(path, blob)
                return
            if blob.exists():
                yield None
                return


def _resumed(descriptor: int, size: int) -> tuple[Any, int]:
    """The digest of what an earlier pull has left, and how many bytes that is."""
    os.ftruncate(descriptor, min(os.fstat(descriptor).st_size, size))
    digest, there = sha256(), 0
    while data := os.read(descriptor, BLOCK):
        digest.update(data)
        there += len(data)
    return digest, there


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def verify(store: "Store", found: ResolvedVersion) -> int:
    """Reads every file of a version; returns their bytes.

    Raises:
        CatalogError: Bytes are missing or other than the record says; it names the file.
    """
    for file in found.record.files:
        digest, size = sha256(), 0
        for layer in found.layers[file.path]:
            for data in store.stream(layer):
                digest.update(data)
                size += len(data)
        if (size, digest.hexdigest()) != (file.size, file.sha256):
            what = f"{size:,} bytes" if size != file.size else f"sha256 {digest.hexdigest()}"
            wanted = f"{file.size:,} bytes" if size != file.size else f"sha256 {file.sha256}"
            raise CatalogError(f"file `{file.path}`: expected {wanted}, found {what}, in {found.entry} of {store}")
    return found.record.size

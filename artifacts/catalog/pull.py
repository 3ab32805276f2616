"""From a version in a store to a folder: every byte checked, and the folder is there whole or not at all."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ling3export.artifacts.catalog.layout import OciLayout, Published
from ling3export.artifacts.catalog.record import File
from ling3export.artifacts.files import link_or_copy
from ling3export.artifacts.manifest import MANIFEST, file_record, file_records
from ling3export.artifacts.signing import SIGNATURES, read_trusted
from ling3export.artifacts.staging import staged
from ling3export.foundation.errors import CatalogError

PARALLEL = 4  # files at a time


def pull(
    store: OciLayout,
    version: Published,
    to: Path,
    *,
    force: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Pulls one version into the folder ``to``. On the same file system its files are second names of the blobs.

    The manifest comes first: with trusted keys nothing else is pulled unless one of them has signed it.

    ``report`` is called with a line that names the signers.

    Raises:
        CatalogError: A file is missing, or its bytes differ from the record.
        TrustError: It is not signed by a trusted key.
    """
    files = {file.path: file for file in version.record.files}

    def fetch(path: str) -> None:
        link_or_copy(store.folder / store.blob(files[path].sha256), folder / path)
        _check(folder, path, files[path], store)

    with staged(to, force=force) as folder:
        for path in (MANIFEST, SIGNATURES):
            if path in files:
                fetch(path)
        manifest = read_trusted(folder, report, str(version))
        named = {record.path: record.sha256 for record in file_records(manifest)}
        named |= dict.fromkeys(manifest.weights.files, "")  # their shards have digests, which loading compares
        for path, digest in named.items():
            if path not in files or digest not in ("", files[path].sha256):
                raise CatalogError(f"file `{path}`: the record of {version} lacks it, or has another digest")
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(fetch, named))  # the first error cancels what has not begun


def verify(store: OciLayout, version: Published) -> int:
    """Reads every file of a version; returns their bytes.

    Raises:
        CatalogError: Bytes are missing or differ from the record; it names the file.
    """
    for file in version.record.files:
        _check(store.folder, store.blob(file.sha256), file, store)
    return version.record.size


def _check(folder: Path, path: str, file: File, store: OciLayout) -> None:
    record = file_record(folder, path)
    if (record.bytes, record.sha256) != (file.size, file.sha256):
        different = record.bytes != file.size
        expected = f"{file.size:,} bytes" if different else f"sha256 {file.sha256}"
        actual = f"{record.bytes:,} bytes" if different else f"sha256 {record.sha256}"
        raise CatalogError(
            f"file `{file.path}`: expected {expected}, found {actual}, in {store}",
            f"the store is damaged: remove its blob {file.sha256}, and copy or publish the version again",
        )

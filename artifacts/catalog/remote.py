"""A layout that fsspec reaches (``s3://…``, ``gs://…``, ``https://…`` for reading); extra ``remote``.

A file appears there whole, when it is closed. S3 and Google's stores write the index only if it is what was read before
(If-Match, ifGenerationMatch), so of two publications at a time none is lost; all others are read alone.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import fsspec

from ling3export.artifacts.catalog.layout import INDEX, LAYOUT, LAYOUT_DATA, OciLayout, blocks
from ling3export.artifacts.catalog.oci import Block, Descriptor
from ling3export.foundation.errors import CatalogError

# What file systems raise; aiohttp's errors are OSErrors or ValueErrors.
FAILURES = (OSError, ValueError, RuntimeError, NotImplementedError)
PATIENCE = 60.0  # seconds to wait for another one who changes the index: it takes two requests
RANGE = 8 << 20  # bytes of a request
# Stores that write on a condition: what the details of an object call its content, and a name that none has.
NAMES = {"s3": ("ETag", '"0"'), "gs": ("generation", "1")}
REFUSED = (409, 412)  # what HTTP says where a condition does not hold, or another request is being carried out


class _Beaten(Exception):
    """Another writer has changed the index since it was read."""


class RemoteLayout(OciLayout):
    """An OCI image layout at a URL.

    Args:
        url: Where ``index.json`` is.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._web = url.startswith("http")
        try:
            self._files, self._path = fsspec.core.url_to_fs(self._url, use_listings_cache=False)
        except (ImportError, *FAILURES) as error:
            raise CatalogError(f"store `{url}`: expected one that fsspec knows, found: {error}") from error
        protocols = {self._files.protocol} if isinstance(self._files.protocol, str) else {*self._files.protocol}
        self._kind = next((kind for kind in NAMES if kind in protocols), None)
        self._read_tag: str | None = None  # what the store calls the index that was read last

    def __str__(self) -> str:
        return self._url

    # --- reading -----------------------------------------------------------------------------------------------------

    def _bytes(self, path: str, largest: int) -> bytes:
        with self._opening(path):
            if path == INDEX and self._kind:  # before its bytes: with those of an older one nothing is written
                self._read_tag = self._files.info(self._at(path))[NAMES[self._kind][0]]
            if self._web:
                options = {} if self._ranges(path) else {"block_size": 0}
                with self._files.open(self._at(path), "rb", **options) as file:
                    data: bytes = file.read(largest + 1)
            else:  # in one request, so that all of it is of one moment
                options = {"concurrency": 1} if self._kind == "gs" else {}
                data = self._files.cat_file(self._at(path), start=0, end=largest + 1, **options)
        if len(data) > largest:
            raise OSError(f"more than {largest:,} bytes")
        return data

    def _blocks(self, path: str, start: int, stop: int) -> Iterator[Block]:
        with self._opening(path):
            if not self._ranges(path):  # all is sent, from the begin on
                with self._files.open(self._at(path), "rb", block_size=0) as file:
                    for _ in blocks(file, start):
                        pass
                    yield from blocks(file, stop - start)
                return
            if (start, stop) == (0, 1):  # an empty file, perhaps: of that there is no part
                yield self._files.cat_file(self._at(path))
                return
            while start < stop:
                left = stop - start
                count = left if left < 2 * RANGE else RANGE  # so that none begins behind the last byte
                data: bytes = self._files.cat_file(self._at(path), start=start, end=start + count)
                yield data
                if len(data) < count:
                    return
                start += count

    def _ranges(self, path: str) -> bool:
        """Whether parts of a file can be read; a web server says so of each."""
        return not self._web or bool(self._files.info(self._at(path)).get("partial"))

    @contextmanager
    def _opening(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise OSError(2, "No such file", f"{self._url}/{path}") from error
        except Exception as error:
            if not _is_foreign(error):
                raise
            raise OSError(5, f"{type(error).__name__}", f"{self._url}/{path}") from error

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}"

    # --- writing -----------------------------------------------------------------------------------------------------

    def gc(self) -> tuple[int, int]:
        raise CatalogError(
            f"store `{self}`: expected oci:FOLDER, found one where nobody knows who else is publishing",
            "remove blobs that no manifest names with the store's own tools, while nobody publishes",
        )

    def _begin(self) -> None:
        if self._kind is None:
            raise CatalogError(
                f"store `{self}`: expected oci:FOLDER, s3:// or gs://, found one that is read alone",
                "publish into oci:FOLDER, and copy the folder there: blobs first, index.json last",
            )

    def _there(self, path: str) -> bool:
        with self._failing("read", path):
            return bool(self._files.exists(self._at(path)))

    def enter(self, id: str, version: str, manifest: Descriptor) -> None:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                return super().enter(id, version, manifest)
            except _Beaten:
                if time.monotonic() > until:
                    raise CatalogError(
                        f"store `{self}`: expected its index to stay as it was read, found others changing it for "
                        f"{PATIENCE:g} s",
                        "try again: what was written is there",
                    ) from None

    def _write_index(self, manifests: Sequence[Descriptor]) -> None:
        if manifests:
            super()._write_index(manifests)
            return
        self._read_tag = None
        with suppress(_Beaten):  # somebody else has made it meanwhile
            super()._write_index(())

    def _put(self, path: str, data: bytes) -> None:
        if path == INDEX:
            self._check_conditions()
            self._put_if(path, data, self._read_tag)
        else:
            super()._put(path, data)

    def _check_conditions(self) -> None:
        """Passes where the store refuses what must not be written: not all that speak S3 know conditions."""
        with suppress(_Beaten):
            self._put_if(LAYOUT, LAYOUT_DATA, NAMES[self._kind or ""][1])
            raise CatalogError(
                f"store `{self}`: expected one that writes on a condition, found one that writes in any case",
                "of two publications at a time one could be lost: publish into oci:FOLDER, and copy the folder there",
            )

    def _put_if(self, path: str, data: bytes, tag: str | None) -> None:
        """Writes an object if the store still calls it ``tag``; if that is None, if there is none.

        Raises:
            _Beaten: It does not.
        """
        with self._failing("write", path):
            try:
                if self._kind == "gs":
                    bucket, name, _ = self._files.split_path(self._at(path))
                    url = f"{self._files.base.replace('/storage/v1/', '/upload/storage/v1/')}b/{bucket}/o"
                    what = {"uploadType": "media", "name": name, "data": data}
                    self._files.call("POST", url, ifGenerationMatch=tag or "0", **what)
                else:
                    condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
                    self._files.pipe_file(self._at(path), data, **condition)
            except Exception as error:
                if not isinstance(error, FileExistsError) and _status(error) not in REFUSED:  # gcsfs says it so
                    raise
                raise _Beaten from error

    @contextmanager
    def _written(self, path: str, size: int) -> Iterator[Any]:
        with self._failing("write", path), self._files.transaction, self._files.open(self._at(path), "wb") as file:
            yield file

    @contextmanager
    def _locked(self, name: str, how: int = 0) -> Iterator[None]:
        yield  # nobody holds anything: the index is written on a condition

    @contextmanager
    def _failing(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not _is_foreign(error):
                raise
            raise CatalogError(
                f"store `{self}`: expected to {what} {path}, found {type(error).__name__}: {error}"
            ) from error


def _status(error: Exception) -> int | None:
    """What HTTP said, as s3fs or gcsfs tells it; None where neither does."""
    reply = getattr(error.__cause__, "response", None)
    found: int | None = getattr(error, "code", None)
    return reply["ResponseMetadata"].get("HTTPStatusCode") if isinstance(reply, dict) else found


def _is_foreign(error: Exception) -> bool:
    """Whether a file system raised it: gcsfs's HttpError is none of FAILURES."""
    return isinstance(error, FAILURES) or _status(error) is not None

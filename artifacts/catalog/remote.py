"""A layout that fsspec reaches (``https://…``, ``s3://…``, ``gs://…``), for reading; extra ``remote``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from ling3export.artifacts.catalog.layout import BLOCK, Layout
from ling3export.errors import CatalogError

FAILURES = (OSError, ValueError, RuntimeError)  # what file systems raise; aiohttp's errors are OSErrors or ValueErrors


class Remote(Layout):
    """An OCI image layout at a URL. It is published into ``oci:FOLDER`` and copied there.

    Args:
        url: Where ``index.json`` is.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            self._files, self._path = fsspec.core.url_to_fs(self._url)
        except (ImportError, *FAILURES) as error:
            raise CatalogError(f"store `{url}`: expected one that fsspec knows, found: {error}") from error

    def __str__(self) -> str:
        return self._url

    def _bytes(self, path: str, largest: int) -> bytes:
        with self._opened(path) as file:
            data: bytes = file.read(largest + 1)
        if len(data) > largest:
            raise OSError(f"more than {largest:,} bytes")
        return data

    def _blocks(self, path: str, start: int) -> Iterator[bytes]:
        with self._opened(path) as file:
            if self._ranges(path):
                file.seek(start)
            else:  # all is sent, from the begin on
                while start and (data := file.read(min(BLOCK, start))):
                    start -= len(data)
            while data := file.read(BLOCK):
                yield data

    def _ranges(self, path: str) -> bool:
        """Whether parts of a file can be read; a web server says so of each."""
        return not self._url.startswith("http") or bool(self._files.info(f"{self._path}/{path}").get("partial"))

    @contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        try:
            options = {} if self._ranges(path) else {"block_size": 0}
            with self._files.open(f"{self._path}/{path}", "rb", **options) as file:
                yield file
        except FileNotFoundError as error:
            raise OSError(2, "No such file", f"{self._url}/{path}") from error
        except CatalogError:
            raise
        except FAILURES as error:
            raise OSError(5, f"{type(error).__name__}", f"{self._url}/{path}") from error

    def _writes(self) -> None:
        raise CatalogError(
            f"store `{self}`: expected one that can be written, found one that is read alone",
            "publish into oci:FOLDER, and copy the folder there: blobs first, index.json last",
        )

"""A layout that fsspec reaches (``s3://…``, ``gs://…``, ``https://…`` for reading); extra ``remote``.

A file appears there whole, when it is closed. Whoever changes the index holds an object that only one can create.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

from ling3export.artifacts.catalog.layout import BLOCK, TAGS, Layout, blocks
from ling3export.errors import CatalogError

FAILURES = (OSError, ValueError, RuntimeError)  # what file systems raise; aiohttp's errors are OSErrors or ValueErrors
PATIENCE = 60.0  # seconds to wait for another one who changes the index: it takes two requests


class Remote(Layout):
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

    def __str__(self) -> str:
        return self._url

    # --- reading -----------------------------------------------------------------------------------------------------

    def _bytes(self, path: str, largest: int) -> bytes:
        with self._opened(path) as file:
            data: bytes = file.read(largest + 1)
        if len(data) > largest:
            raise OSError(f"more than {largest:,} bytes")
        return data

    def _blocks(self, path: str, start: int, stop: int) -> Iterator[bytes]:
        with self._opened(path) as file:
            if self._ranges(path):
                file.seek(start)
            else:  # all is sent, from the begin on
                for _ in blocks(file, start):
                    pass
            yield from blocks(file, stop - start)

    def _ranges(self, path: str) -> bool:
        """Whether parts of a file can be read; a web server says so of each."""
        return not self._web or bool(self._files.info(self._at(path)).get("partial"))

    @contextmanager
    def _opened(self, path: str) -> Iterator[Any]:
        try:
            options = {} if self._ranges(path) else {"block_size": 0}
            with self._files.open(self._at(path), "rb", **options) as file:
                yield file
        except FileNotFoundError as error:
            raise OSError(2, "No such file", f"{self._url}/{path}") from error
        except CatalogError:
            raise
        except FAILURES as error:
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
        if self._web or self._url.startswith(("file:", "local:")):  # fsspec writes no file of a folder at once
            raise CatalogError(
                f"store `{self}`: expected one that can be written, found one that is read alone",
                "publish into oci:FOLDER, and copy the folder there: blobs first, index.json last",
            )

    def _there(self, path: str) -> bool:
        with self._failing("read", path):
            return bool(self._files.exists(self._at(path)))

    @contextmanager
    def _written(self, path: str, size: int) -> Iterator[Any]:
        with self._failing("write", path), self._files.transaction, self._files.open(self._at(path), "wb") as file:
            yield file

    @contextmanager
    def _locked(self, name: str, how: int = 0) -> Iterator[None]:
        if name != TAGS:  # what tells gc of publishers
            yield
            return
        said, until = f"{socket.gethostname()}, process {os.getpid()}", time.monotonic() + PATIENCE
        while not self._created(name, said):
            if time.monotonic() > until:
                holder = "".join(each.decode(errors="replace") for each in self._blocks(name, 0, BLOCK))
                raise CatalogError(
                    f"store `{self}`: expected its index to be free within {PATIENCE:g} s, found it held by {holder}",
                    f"if that has ended, remove {self._url}/{name}",
                )
            time.sleep(0.1)
        try:
            yield
        finally:
            with self._failing("remove", name):
                self._files.rm_file(self._at(name))

    def _created(self, path: str, text: str) -> bool:
        """Creates an object; False if it is there."""
        with self._failing("create", path):
            try:
                with self._files.open(self._at(path), "xb") as file:
                    file.write(text.encode())
            except FileExistsError:
                return False
        return True

    @contextmanager
    def _failing(self, what: str, path: str) -> Iterator[None]:
        try:
            yield
        except (*FAILURES, NotImplementedError) as error:
            raise CatalogError(
                f"store `{self}`: expected to {what} {path}, found {type(error).__name__}: {error}"
            ) from error

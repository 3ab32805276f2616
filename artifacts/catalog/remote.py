"""A layout that fsspec reaches (``s3://…``, ``gs://…``, ``https://…``), to be read alone; extra ``remote``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import fsspec

from ling3export.artifacts.catalog.layout import OciLayout, blocks
from ling3export.artifacts.catalog.oci import Block
from ling3export.foundation.errors import CatalogError

# What file systems raise; aiohttp's errors are OSErrors or ValueErrors.
FAILURES = (OSError, ValueError, RuntimeError, NotImplementedError)
RANGE = 8 << 20  # bytes of a request


class RemoteLayout(OciLayout):
    """An OCI image layout at a URL.

    Args:
        url: Where ``index.json`` is.

    Attributes:
        files: The file system that reads it.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._web = url.startswith("http")
        try:
            self.files, self._path = fsspec.core.url_to_fs(self._url, use_listings_cache=False)
        except (ImportError, *FAILURES) as error:
            raise CatalogError(f"store `{url}`: expected one that fsspec knows, found: {error}") from error

    def __str__(self) -> str:
        return self._url

    def _bytes(self, path: str, largest: int) -> bytes:
        with self._opening(path):
            if self._web:
                options = {} if self._ranges(path) else {"block_size": 0}
                with self.files.open(self._at(path), "rb", **options) as file:
                    data: bytes = file.read(largest + 1)
            else:  # in one request, so that all of it is of one moment
                options = {"concurrency": 1} if self._url.startswith("gs:") else {}
                data = self.files.cat_file(self._at(path), start=0, end=largest + 1, **options)
        if len(data) > largest:
            raise OSError(f"more than {largest:,} bytes")
        return data

    def _blocks(self, path: str, start: int, stop: int) -> Iterator[Block]:
        with self._opening(path):
            if not self._ranges(path):  # all is sent, from the begin on
                with self.files.open(self._at(path), "rb", block_size=0) as file:
                    for _ in blocks(file, start):
                        pass
                    yield from blocks(file, stop - start)
                return
            if (start, stop) == (0, 1):  # an empty file, perhaps: of that there is no part
                yield self.files.cat_file(self._at(path))
                return
            while start < stop:
                left = stop - start
                count = left if left < 2 * RANGE else RANGE  # so that none begins behind the last byte
                data: bytes = self.files.cat_file(self._at(path), start=start, end=start + count)
                yield data
                if len(data) < count:
                    return
                start += count

    def _ranges(self, path: str) -> bool:
        """Whether parts of a file can be read; a web server says so of each."""
        return not self._web or bool(self.files.info(self._at(path)).get("partial"))

    @contextmanager
    def _opening(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise OSError(2, "No such file", f"{self._url}/{path}") from error
        except Exception as error:
            if not isinstance(error, FAILURES) and not hasattr(error, "code"):  # gcsfs's HttpError is none of them
                raise
            raise OSError(5, f"{type(error).__name__}", f"{self._url}/{path}") from error

    def _at(self, path: str) -> str:
        return f"{self._path}/{path}"

    def writing(self, id: str) -> NoReturn:
        raise CatalogError(
            f"store `{self}`: expected oci:FOLDER or a registry, found one that is read alone",
            "publish into oci:FOLDER, and copy the folder there: blobs first, index.json last",
        )

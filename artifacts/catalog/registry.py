"""A store in an OCI registry (``HOST/NAME:TAG``), by the distribution specification 1.1; extra ``oci``.

A file is a layer whose title is its whole path. Blobs come first, then the manifest under its version, then ``latest``.
The registry has no lock: of two publishers of one version the second is refused only if the first had ended.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests

from ling3export.artifacts.catalog import oci
from ling3export.artifacts.catalog.credentials import TIMEOUT, TOKEN, Credentials, authorization, bounded
from ling3export.artifacts.catalog.layout import BLOCK, existing
from ling3export.artifacts.catalog.oci import CatalogEntry, Descriptor, LayerSource
from ling3export.artifacts.catalog.record import LARGEST, parsed
from ling3export.artifacts.catalog.versions import is_version, latest, order
from ling3export.foundation.errors import AuthDenied, AuthRequired, CatalogError
from ling3export.foundation.reading import opened

PAGES = 1000  # of a list of tags, whose texts together are a document


class Registry:
    """A registry, or a part of its names.

    Args:
        text: ``HOST[:PORT][/PREFIX]``. On this machine it is spoken to without TLS.

    Attributes:
        session: What every request goes through.
        credentials: What is sent to the registry's own host, and to no other.
    """

    def __init__(self, text: str) -> None:
        self._host, _, prefix = text.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        here = self._host.partition(":")[0] in ("localhost", "127.0.0.1")
        self._base = f"{'http' if here else 'https'}://{self._host}/v2/"
        self.session = requests.Session()
        self.session.headers["Accept-Encoding"] = "identity"  # bytes are counted, and parts of them asked for
        self.session.auth = self.credentials = Credentials(self._host, authorization(self._host))
        self._homes: dict[str, str] = {}  # which repository a blob was named in
        self._repository = ""
        self._documents: dict[str, bytes] = {}

    def __str__(self) -> str:
        return f"{self._host}/{self._prefix}".rstrip("/")

    # --- reading -----------------------------------------------------------------------------------------------------

    def entries(self, id: str | None = None) -> list[CatalogEntry]:
        """Every version, or those of one id, in order, with a request each."""
        named = [(name, version) for name in self._ids(id) for version in self.versions(name)]
        return [entry for each in named if (entry := self.entry(*each)) is not None]

    def versions(self, id: str) -> list[str]:
        """The versions of an id, in order."""
        tags = self._listed(f"{self._prefix}{id}/tags/list", "tags")
        return sorted((version for tag in tags if is_version(version := tag.replace("_", "+"))), key=order)

    def entry(self, id: str, version: str) -> CatalogEntry | None:
        """A version, if it is there: one request, however many there are besides."""
        repository = self._prefix + id
        path = f"{repository}/manifests/{_tag(version)}"
        reply = self._call("GET", path, missing=True, headers={"Accept": oci.MANIFEST})
        if reply.status_code == 404:
            return None
        data = bounded(reply, str(self))
        blob = Descriptor(mediaType=oci.MANIFEST, digest=f"sha256:{sha256(data).hexdigest()}", size=len(data))
        self._homes[blob.digest] = repository
        self._documents[blob.digest] = data
        return CatalogEntry(id, version, blob)

    def _ids(self, id: str | None) -> list[str]:
        if id is not None:
            return [id]
        below = [
            each.removeprefix(self._prefix)
            for each in self._listed("_catalog", "repositories")
            if each.startswith(self._prefix)
        ]
        return sorted(each for each in below if "/" not in each)

    def _listed(self, path: str, field: str) -> list[str]:
        """A list that comes in pages.

        Raises:
            CatalogError: The pages have no end, lead to another host, or are no lists of text.
        """
        found: list[str] = []
        url, seen, room = urljoin(self._base, path), set[str](), LARGEST
        while url not in seen:
            seen.add(url)
            reply = self._call("GET", url, missing=field == "tags")  # where there is no list of names, none is found
            if reply.status_code == 404:
                return found
            data = bounded(reply, str(self), room)
            room -= len(data)
            page = parsed(data, str(self), path).get(field) or []
            if not isinstance(page, list) or not all(isinstance(each, str) for each in page):
                raise CatalogError(f"{path}: expected `{field}` to be a list of text, found another, in {self}")
            found += page
            following = reply.links.get("next", {}).get("url")
            if following is None:
                return found
            url = urljoin(url, following)
            if not url.startswith(self._base) or len(seen) == PAGES:
                what = f"more than {PAGES:,}" if url.startswith(self._base) else "one of another host"
                raise CatalogError(f"{path}: expected pages of this registry, found {what}, in {self}")
        raise CatalogError(f"{path}: expected each page once, found one that names itself or an earlier one, in {self}")

    def read(self, blob: Descriptor) -> bytes:
        """A manifest or a record, its digest checked."""
        data = self._documents.get(blob.digest)
        if data is None:
            data = bounded(self._call("GET", f"{self._home(blob)}/blobs/{blob.digest}"), str(self))
        if f"sha256:{sha256(data).hexdigest()}" != blob.digest:
            raise CatalogError(f"blob `{blob.digest}`: expected bytes of this digest, found others, in {self}")
        if blob.mediaType == oci.MANIFEST:
            image = oci.image_of(data, str(self))
            self._homes |= {each.digest: self._home(blob) for each in (image.config, *image.layers)}
        return data

    def stream(self, blob: Descriptor, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes of a blob from ``start`` to ``stop``, not checked.

        Raises:
            ConnectionError: The registry broke off.
        """
        stop = blob.size if stop is None else stop
        headers = {} if (start, stop) == (0, blob.size) else {"Range": f"bytes={start}-{stop - 1}"}
        reply = self._call("GET", f"{self._home(blob)}/blobs/{blob.digest}", headers=headers)
        at = 0 if reply.status_code == 200 else start  # a registry without ranges sends all
        with reply:
            try:
                for data in reply.iter_content(BLOCK):
                    yield data[max(0, start - at) :]
                    at += len(data)
                    if headers and at >= stop:
                        return
            except requests.RequestException as error:
                raise ConnectionError(f"{self}: {type(error).__name__}") from None

    def _home(self, blob: Descriptor) -> str:
        return self._homes[blob.digest]

    # --- writing -----------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, id: str) -> Iterator[None]:
        """What is added in the block belongs to ``id``."""
        self._repository = self._prefix + id
        yield

    def add(self, part: LayerSource) -> int:
        """Uploads a part of a file unless the registry has it; returns how many bytes moved."""
        if self._has(part.digest):
            return 0
        with opened(part.path, part.title) as file:
            file.seek(part.start)
            self._upload(part.digest, BlobBody(file, part.size))
        return part.size

    def add_document(self, data: bytes, media: str, artifact: str | None = None) -> Descriptor:
        """Uploads a record; keeps a manifest, which :meth:`enter` uploads."""
        blob = Descriptor(mediaType=media, digest=f"sha256:{sha256(data).hexdigest()}", size=len(data))
        self._documents[blob.digest], self._homes[blob.digest] = data, self._repository
        if media != oci.MANIFEST and not self._has(blob.digest):
            self._upload(blob.digest, data)
        return replace(blob, artifactType=artifact)

    def enter(self, id: str, version: str, manifest: Descriptor) -> None:
        """Makes a version, and moves ``latest``.

        Raises:
            VersionExists: It is there.
        """
        there = self.versions(id)
        if version in there:
            raise existing(id, version, self)
        data, headers = self._documents[manifest.digest], {"Content-Type": oci.MANIFEST}
        for tag in (_tag(version), *(["latest"] if latest([*there, version]) == version else [])):
            self._call("PUT", f"{self._prefix}{id}/manifests/{tag}", data=data, headers=headers)

    def _has(self, digest: str) -> bool:
        return self._call("HEAD", f"{self._repository}/blobs/{digest}", missing=True).status_code == 200

    def _upload(self, digest: str, data: Any) -> None:
        begun = self._call("POST", f"{self._repository}/blobs/uploads/")
        place = urljoin(begun.url, begun.headers.get("Location", ""))
        headers = {"Content-Type": "application/octet-stream"}
        self._call("PUT", place, data=data, params={"digest": digest}, headers=headers)

    def _call(self, method: str, path: str, *, missing: bool = False, **options: Any) -> requests.Response:
        """Asks the registry.

        Raises:
            AuthRequired, AuthDenied: There is no token, or not the right one.
            CatalogError: It is not there, or refuses for another reason.
        """
        url = urljoin(self._base, path)
        reply = self._asked(method, url, options)
        if reply.status_code == 401 and self.credentials.exchanged(reply, str(self)):
            if isinstance(body := options.get("data"), BlobBody):
                body.rewind()
            reply = self._asked(method, url, options)
        if reply.status_code in (401, 403):
            if self.credentials.header is None and reply.status_code == 401:
                raise AuthRequired(
                    f"store `{self}`: expected a token, found none", f"put it into {TOKEN}, or log in with docker"
                )
            raise AuthDenied(f"store `{self}`: expected a token that may do this, found one that may not")
        if reply.status_code >= 400 and not (missing and reply.status_code == 404):
            raise CatalogError(f"store `{self}`: expected to {method} {urlsplit(url).path}, found {reply.status_code}")
        return reply

    def _asked(self, method: str, url: str, options: dict[str, Any]) -> requests.Response:
        try:
            reply = self.session.request(method, url, timeout=TIMEOUT, stream=True, **options)
        except requests.RequestException as error:
            raise CatalogError(f"store `{self}`: expected an answer, found {type(error).__name__}") from None
        if reply.status_code >= 400:
            reply.close()  # nobody reads it
        elif method != "GET":
            bounded(reply, str(self))  # so that the connection is used again
        if url.startswith("https:") and not reply.url.startswith("https:"):
            raise CatalogError(f"store `{self}`: expected an answer by https, found one from {reply.url}")
        return reply


class BlobBody:
    """So many bytes of an open file, as requests sends them: with their length."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._size, self._left, self._start = file, size, size, file.tell()

    def rewind(self) -> None:
        """To be sent again."""
        self._file.seek(self._start)
        self._left = self._size

    def __len__(self) -> int:
        return self._size

    def read(self, count: int = -1) -> bytes:
        """The next ones."""
        data: bytes = self._file.read(self._left if count < 0 else min(count, self._left))
        self._left -= len(data)
        return data


def _tag(version: str) -> str:
    """What a version is called where names have no ``+``."""
    return version.replace("+", "_")

"""A store in an OCI registry (``HOST/NAME:TAG``), by the distribution specification 1.1; extra ``oci``.

A file is a layer whose title is its whole path. Blobs come first, then the manifest under its version, then ``latest``.
The registry has no lock: of two publishers of one version the second is refused only if the first had ended.
"""

import base64
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests
from requests.auth import AuthBase

from ling3export.artifacts.catalog import oci
from ling3export.artifacts.catalog.layout import BLOCK
from ling3export.artifacts.catalog.oci import Descriptor, Entry, Part
from ling3export.artifacts.catalog.record import LARGEST, parsed
from ling3export.artifacts.catalog.versions import is_version, latest, order
from ling3export.errors import AuthDenied, AuthRequired, CatalogError, VersionExists
from ling3export.reading import opened
from ling3export.strict_json import read_json

TOKEN = "LING3_CATALOG_TOKEN"
TIMEOUT = (10, 60)  # seconds to connect, and without a byte
PAGES = 1000  # of a list of tags


class _Credentials(AuthBase):
    """Adds a header; requests leaves it out where a redirect leads to another host."""

    def __init__(self, header: str | None) -> None:
        self.header = header

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self.header is not None:
            request.headers["Authorization"] = self.header
        return request


class Registry:
    """A registry, or a part of its names.

    Args:
        text: ``HOST[:PORT][/PREFIX]``. On this machine it is spoken to without TLS.
    """

    def __init__(self, text: str) -> None:
        self._host, _, prefix = text.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        here = self._host.partition(":")[0] in ("localhost", "127.0.0.1")
        self._base = f"{'http' if here else 'https'}://{self._host}/v2/"
        self._session = requests.Session()
        self._session.auth = self._credentials = _Credentials(_authorization(self._host))
        self._homes: dict[str, str] = {}  # which repository a blob was named in
        self._repository = ""
        self._documents: dict[str, bytes] = {}

    def __str__(self) -> str:
        return f"{self._host}/{self._prefix}".rstrip("/")

    # --- reading -----------------------------------------------------------------------------------------------------

    def entries(self, id: str | None = None) -> list[Entry]:
        """Every version, or those of one id."""
        found = []
        for name in [id] if id is not None else self._ids():
            repository = self._prefix + name
            for tag in self._listed(f"{repository}/tags/list", "tags"):
                if is_version(version := tag.replace("_", "+")):
                    found.append(Entry(name, version, self._head(repository, tag)))
        return sorted(found, key=lambda entry: (entry.id, order(entry.version)))

    def _ids(self) -> list[str]:
        names = self._listed("_catalog", "repositories")
        return [each.removeprefix(self._prefix) for each in names
                if each.startswith(self._prefix) and "/" not in each.removeprefix(self._prefix)]  # fmt: skip

    def _listed(self, path: str, field: str) -> list[str]:
        """A list that comes in pages."""
        found: list[str] = []
        for _ in range(PAGES):
            reply = self._call("GET", path, missing=True)
            if reply.status_code == 404:
                break
            page = parsed(_bounded(reply, str(self)), str(self), path).get(field) or []
            if not isinstance(page, list) or not all(isinstance(each, str) for each in page):
                raise CatalogError(f"{path}: expected `{field}` to be a list of text, found another, in {self}")
            found += page
            following = reply.links.get("next", {}).get("url")
            if following is None:
                break
            path = urljoin(reply.url, following)
        return found

    def _head(self, repository: str, tag: str) -> Descriptor:
        reply = self._call("GET", f"{repository}/manifests/{tag}", headers={"Accept": oci.MANIFEST})
        data = _bounded(reply, str(self))
        blob = Descriptor(mediaType=oci.MANIFEST, digest=f"sha256:{sha256(data).hexdigest()}", size=len(data))
        self._homes[blob.digest] = repository
        self._documents[blob.digest] = data
        return blob

    def read(self, blob: Descriptor) -> bytes:
        """A manifest or a record, its digest checked."""
        data = self._documents.get(blob.digest)
        if data is None:
            data = _bounded(self._call("GET", f"{self._home(blob)}/blobs/{blob.digest}", stream=True), str(self))
        if f"sha256:{sha256(data).hexdigest()}" != blob.digest:
            raise CatalogError(f"blob `{blob.digest}`: expected bytes of this digest, found others, in {self}")
        if blob.mediaType == oci.MANIFEST:
            where = str(self)
            image = oci.foreign(oci.ImageManifest, parsed(data, where, "manifest"), where, "manifest")
            self._homes |= {each.digest: self._home(blob) for each in (image.config, *image.layers)}
        return data

    def stream(self, blob: Descriptor, start: int = 0) -> Iterator[bytes]:
        """The bytes of a blob from ``start`` on, not checked.

        Raises:
            ConnectionError: The registry broke off.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        reply = self._call("GET", f"{self._home(blob)}/blobs/{blob.digest}", headers=headers, stream=True)
        skip = start if reply.status_code == 200 else 0  # a registry without ranges sends all
        with reply:
            try:
                for data in reply.iter_content(BLOCK):
                    yield data[skip:]
                    skip = max(0, skip - len(data))
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

    def add(self, part: Part) -> int:
        """Uploads a part of a file unless the registry has it; returns how many bytes moved."""
        if self._has(part.digest):
            return 0
        with opened(part.path, part.title) as file:
            file.seek(part.start)
            self._upload(part.digest, _Range(file, part.size))
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
        repository = self._prefix + id
        there = [entry.version for entry in self.entries(id)]
        if version in there:
            raise VersionExists(
                f"version `{id}@{version}`: expected a new one, found one with other content, in {self}",
                "what was published never changes: publish under the next version",
            )
        for tag in (version.replace("+", "_"), *(["latest"] if latest([*there, version]) == version else [])):
            data = self._documents[manifest.digest]
            self._call("PUT", f"{repository}/manifests/{tag}", data=data, headers={"Content-Type": oci.MANIFEST})

    def _has(self, digest: str) -> bool:
        return self._call("HEAD", f"{self._repository}/blobs/{digest}", missing=True).status_code == 200

    def _upload(self, digest: str, data: Any) -> None:
        begun = self._call("POST", f"{self._repository}/blobs/uploads/")
        place = urljoin(begun.url, begun.headers.get("Location", ""))
        if urlsplit(place).netloc != self._host:
            self._credentials.header, kept = None, self._credentials.header
        else:
            kept = self._credentials.header
        try:
            self._call("PUT", place, data=data, params={"digest": digest},
                       headers={"Content-Type": "application/octet-stream"})  # fmt: skip
        finally:
            self._credentials.header = kept

    def _call(self, method: str, path: str, *, missing: bool = False, **options: Any) -> requests.Response:
        """Asks the registry.

        Raises:
            AuthRequired, AuthDenied: There is no token, or not the right one.
            CatalogError: It is not there, or refuses for another reason.
        """
        url = urljoin(self._base, path)
        try:
            reply = self._session.request(method, url, timeout=TIMEOUT, **options)
        except requests.RequestException as error:
            raise CatalogError(f"store `{self}`: expected an answer, found {type(error).__name__}") from None
        if reply.status_code in (401, 403):
            if self._credentials.header is None and reply.status_code == 401:
                raise AuthRequired(
                    f"store `{self}`: expected a token, found none", f"put it into {TOKEN}, or log in with docker"
                )
            raise AuthDenied(f"store `{self}`: expected a token that may do this, found one that may not")
        if reply.status_code >= 400 and not (missing and reply.status_code == 404):
            raise CatalogError(f"store `{self}`: expected to {method} {urlsplit(url).path}, found {reply.status_code}")
        return reply


class _Range:
    """So many bytes of an open file, as requests sends them: with their length."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._size, self._left = file, size, size

    def __len__(self) -> int:
        return self._size

    def read(self, count: int = -1) -> bytes:
        """The next ones."""
        data: bytes = self._file.read(self._left if count < 0 else min(count, self._left))
        self._left -= len(data)
        return data


def _bounded(reply: requests.Response, where: str) -> bytes:
    """The body of an answer that is a document.

    Raises:
        CatalogError: It is too long for one, or breaks off.
    """
    found = b""
    try:
        for data in reply.iter_content(BLOCK):
            found += data
            if len(found) > LARGEST:
                raise CatalogError(f"store `{where}`: expected a document of at most {LARGEST:,} bytes, found more")
    except requests.RequestException as error:
        raise CatalogError(f"store `{where}`: expected a whole answer, found {type(error).__name__}") from None
    return found


def _authorization(host: str) -> str | None:
    """The header for a registry: the token of LING3_CATALOG_TOKEN, or of the file (0600) that it names, or docker's.

    Raises:
        AuthDenied: Others may read the file.
    """
    if token := os.environ.get(TOKEN):
        path = Path(token)
        if path.is_absolute():
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise AuthDenied(f"token file `{path}`: expected that its owner alone can read it, found others may")
            token = path.read_text().strip()
        return f"Bearer {token}"
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        known = read_json(folder / "config.json", links=True)["auths"][host]["auth"]
        return f"Basic {base64.b64encode(base64.b64decode(known)).decode()}"
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""Who asks a registry: the user's token or password, and the tokens that a token server gives for it."""

import base64
import os
import re
import stat
import time
from pathlib import Path
from urllib.parse import urlsplit

import requests
import urllib3
from requests.auth import AuthBase
from requests.utils import parse_dict_header

from ling3export.artifacts.catalog.record import LARGEST, parsed
from ling3export.foundation.errors import AuthDenied, AuthRequired, CatalogError
from ling3export.foundation.strict_json import read_json

TOKEN = "LING3_CATALOG_TOKEN"
TIMEOUT = (10, 60)  # seconds to connect, and without a byte
DEADLINE = 120.0  # seconds for the whole of a document, however slowly it drips
LARGEST_TOKEN = 64 << 10  # bytes of a file that holds one


class Credentials(AuthBase):
    """Adds a header to what goes to one host; requests leaves it out where a redirect leads to another.

    Args:
        host: The registry's host, with its port.
        header: What the user has given, as it is sent; None where that is nothing.

    Attributes:
        token: What a token server has given for it, which is sent in its place.
    """

    def __init__(self, host: str, header: str | None) -> None:
        self._host, self.header = host, header
        self.token: str | None = None

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        header = self.token or self.header
        if header is not None and urlsplit(request.url or "").netloc == self._host:
            request.headers["Authorization"] = header
        return request

    def exchanged(self, reply: requests.Response, where: str) -> bool:
        """Gets a token where the registry says, as docker does: for the user and password, or for nothing.

        The user and password are sent to the registry's own host alone. Returns whether there is a new token.

        Args:
            reply: A refusal, which says where and for what.
            where: The store, for messages.

        Raises:
            AuthDenied: The token server does not take them.
            CatalogError: It does not answer so.
        """
        kind, _, said = reply.headers.get("WWW-Authenticate", "").partition(" ")
        asked = parse_dict_header(said) if kind.lower() == "bearer" else {}
        realm, given, registry = urlsplit(asked.get("realm") or ""), self.header, urlsplit(reply.url)
        if not realm.netloc or registry.netloc != self._host or (given or "").startswith("Bearer"):
            return False
        if realm.scheme != "https" and registry.scheme == "https":
            raise CatalogError(f"store `{where}`: expected a token server by https, found {realm.geturl()}")
        known = given is not None and realm.hostname == registry.hostname
        try:
            answer = requests.get(
                realm.geturl(),
                {name: asked[name] for name in ("service", "scope") if asked.get(name)},
                auth=Credentials(realm.netloc, given if known else None),
                timeout=TIMEOUT,
                stream=True,
            )
        except requests.RequestException as error:
            raise CatalogError(
                f"store `{where}`: expected a token from {realm.netloc}, found {type(error).__name__}"
            ) from None
        if answer.status_code in (401, 403):
            answer.close()
            sent = "" if known or given is None else f", where a password for {self._host} is not sent"
            raise (AuthDenied if given else AuthRequired)(
                f"store `{where}`: expected a token from {realm.netloc}, found {answer.status_code}{sent}",
                f"log in with docker, or put a token into {TOKEN}",
            )
        page = parsed(bounded(answer, where), where, "token")
        token = page.get("token") or page.get("access_token")
        if answer.status_code != 200 or not isinstance(token, str) or not re.fullmatch(r"[!-~]+", token):
            raise CatalogError(f"store `{where}`: expected a token from {realm.netloc}, found {answer.status_code}")
        self.token = f"Bearer {token}"
        return True


def authorization(host: str) -> str | None:
    """The header for a registry: the token of LING3_CATALOG_TOKEN, or of the file (0600) that it names, or docker's.

    Raises:
        AuthDenied: Others may read the file, it cannot be read, or what is there cannot be sent. The token is not told.
    """
    if token := os.environ.get(TOKEN):
        if os.path.isabs(token):
            token = _token_of(Path(token))
        if not re.fullmatch(r"[!-~]+", token):
            raise AuthDenied(f"{TOKEN}: expected a token of ASCII letters, digits and signs, found other characters")
        return f"Bearer {token}"
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        known = read_json(folder / "config.json", links=True)["auths"][host]["auth"]
        return f"Basic {base64.b64encode(base64.b64decode(known)).decode()}"
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _token_of(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            shared, data = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077, file.read(LARGEST_TOKEN)
    except OSError as error:  # without the path: a token may begin with a slash
        raise AuthDenied(f"{TOKEN}: expected a token or a readable file, found {error.strerror}") from None
    if shared:
        raise AuthDenied(f"token file `{path}`: expected that its owner alone can read it, found others may")
    return data.decode("latin-1").strip()


def bounded(reply: requests.Response, where: str, largest: int = LARGEST) -> bytes:
    """The body of an answer that is a document.

    Raises:
        CatalogError: It is longer than ``largest``, breaks off, or takes longer than DEADLINE.
    """
    found, until = b"", time.monotonic() + DEADLINE
    try:
        with reply:
            while data := reply.raw.read1(64 << 10, decode_content=True):
                found += data
                if len(found) > largest:
                    raise CatalogError(f"store `{where}`: expected a document of at most {largest:,} bytes, found more")
                if time.monotonic() > until:
                    raise CatalogError(f"store `{where}`: expected a document within {DEADLINE:g} s, found a part")
    except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
        raise CatalogError(f"store `{where}`: expected a whole answer, found {type(error).__name__}") from None
    return found

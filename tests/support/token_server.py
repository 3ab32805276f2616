"""Servers that surround a registry: one issues tokens for a password, one redirects callers."""

import base64
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

Answer = tuple[int, dict[str, str], bytes | Iterator[bytes]]
USER = "Basic " + base64.b64encode(b"me:secret").decode()


@contextmanager
def answering(answer: Callable[[str, dict[str, str]], Answer]) -> Iterator[str]:
    """``HOST:PORT`` of a server that sends ``answer(path, headers)`` for every request.

    For a chunked body, the total length is added to the headers.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self.path, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(status)
            length = {"Content-Length": str(len(body))} if isinstance(body, bytes) else {}
            for name, value in (length | headers).items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # the caller closed the connection early
                for piece in [body] if isinstance(body, bytes) else body:
                    self.wfile.write(piece)

        do_HEAD = do_POST = do_PUT = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class TokenServer:
    """Issues tokens that a docker-registry accepts, to the user `me` with the password `secret`.

    Args:
        folder: For the certificate with which the registry checks the tokens.

    Attributes:
        asked: The query and the authorization header of each request.
    """

    def __init__(self, folder: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        name, now = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tokens")]), datetime.now(UTC)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self._key.public_key())
            .serial_number(1)
            .not_valid_before(now - timedelta(1))
            .not_valid_after(now + timedelta(1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.bundle = folder / "tokens.pem"
        self.bundle.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))
        self.asked: list[tuple[str, str | None]] = []

    def answer(self, path: str, headers: dict[str, str]) -> Answer:
        """A token for the scope in the query, or a refusal."""
        query = parse_qs(urlsplit(path).query)
        scopes = query.get("scope", [])
        self.asked.append((" ".join(scopes), headers.get("authorization")))
        if headers.get("authorization") != USER:
            return 401, {}, b"{}"
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        now = int(time.time())
        claims = {
            "iss": "tokens",
            "sub": "me",
            "aud": query["service"][0],
            "iat": now,
            "nbf": now - 60,
            "exp": now + 600,
            "jti": secrets.token_hex(8),
            "access": access,
        }
        return 200, {}, json.dumps({"token": self._signed(claims)}).encode()

    def _signed(self, claims: dict[str, object]) -> str:
        chain = [base64.b64encode(self._certificate.public_bytes(serialization.Encoding.DER)).decode()]
        parts = [_url(json.dumps(each).encode()) for each in ({"typ": "JWT", "alg": "ES256", "x5c": chain}, claims)]
        signature = decode_dss_signature(self._key.sign(".".join(parts).encode(), ec.ECDSA(hashes.SHA256())))
        return ".".join([*parts, _url(b"".join(number.to_bytes(32, "big") for number in signature))])


def _url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()

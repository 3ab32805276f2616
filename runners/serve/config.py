"""The settings of a server, apart from those of its engine."""

import re
from dataclasses import dataclass
from pathlib import Path

from ling3export.foundation.errors import RequestError, shown
from ling3export.runners.engine.validation import NumberRange

MOST = (1 << 31) - 1
ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+")
NUMBERS = {
    "port": NumberRange(0, 65535, whole=True),
    "max_body": NumberRange(1, MOST, whole=True),
    "max_connections": NumberRange(1, MOST, whole=True),
    "grace": NumberRange(0, MOST, whole=True),
}


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where a server listens, whom it lets in, and what clients may take of it.

    Raises:
        RequestError: A number is out of its bounds, or an origin is none.
    """

    host: str = "127.0.0.1"
    """Address to listen at."""

    port: int = 8000
    """Port to listen at; 0 takes a free one."""

    allow_host: tuple[str, ...] = ()
    """Names by which clients may call, beside this machine's own; none of them where others can reach it: any name."""

    allow_origin: tuple[str, ...] = ()
    """Origins of pages that browsers may let call, such as ``https://example.org``; ``*`` is any."""

    generation_config: str = "auto"
    """What sampling settings a request has that names none: ``auto`` those of the checkpoint's generation_config.json,
    ``none`` those of OpenAI's API."""

    model: str | None = None
    """Name that clients ask for; None takes the artifact's, without ``.ling3``."""

    api_key_file: Path | None = None
    """File with the key that clients send as bearer token; None takes the key in LING3_API_KEY, if it is set."""

    kv_events: str | None = None
    """ZeroMQ endpoint at which routers are told what prompts hit here; None tells nobody."""

    max_body: int = 4 << 20
    """Most bytes of a request's body."""

    max_connections: int = 512
    """Most connections at once."""

    grace: int = 30
    """Seconds that running requests have to end after SIGTERM."""

    def __post_init__(self) -> None:
        for name, bounds in NUMBERS.items():
            bounds.number(getattr(self, name), name)
        for origin in self.allow_origin:
            if not ORIGIN.fullmatch(origin):
                wanted = "* or a scheme and a host, such as https://example.org, with the port if it has one"
                raise RequestError(f"allow_origin: expected {wanted}, found {shown(origin)}")

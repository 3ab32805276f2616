"""The life of a server: it binds its port, loads the artifact, then serves clients until a signal ends it."""

import logging
import os
import signal
import socket
from pathlib import Path

import uvicorn

from ling3export.errors import Ling3Error
from ling3export.runners.engine.engine import Engine
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.load.loader import say
from ling3export.runners.serve.app import Policy, application
from ling3export.runners.serve.supervisor import supervised

LINGER = 5.0  # seconds that the server still answers when another host is gone, so that clients hear why
LOOPBACK = ("127.0.0.1", "::1")


def serve(
    artifact: Path, policy: Policy, listener: socket.socket, *, grace: int, target: str | None, programs: str,
    check: str, hosts: Hosts | None = None, restarts: int = 0, step_timeout: float | None = None,
) -> None:  # fmt: skip
    """Serves at the address of ``listener`` (``bound``) until SIGTERM or SIGINT; prints it once clients may connect.

    On several hosts, this is the first and the others follow it. When one of them is gone, calls get 503 for LINGER
    seconds, then the process ends.

    After a failed step the engine is restarted, up to ``restarts`` times in ten minutes. A call of the devices that
    takes longer than ``step_timeout`` seconds stops the engine.

    At the signal it takes no new connections; calls that run have ``grace`` seconds to end, then they are cancelled.

    Raises:
        Ling3Error: The artifact cannot be loaded.
    """
    logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s", level=logging.WARNING)  # to stderr
    with (
        listener,
        Engine(
            artifact, target=target, programs=programs, check=check, max_requests=policy.max_requests, hosts=hosts,
            linger=LINGER, step_timeout=step_timeout,
        ) as engine,
        supervised(engine, restarts),
    ):  # fmt: skip
        if engine.files.there:
            # A broken tokenizer fails here, not at the first client.
            engine.files.tokenizer("text in")
            say(f"serve: {'a' if engine.files.chats else 'no'} chat template")
        host = listener.getsockname()[0]
        if host not in LOOPBACK and policy.api_key is None:
            say(f"serve: {host} may be reached by other machines, and no key is asked for: see --api-key-file")
        config = uvicorn.Config(
            application(engine, policy), log_config=None, access_log=False, server_header=False, lifespan="off",
            timeout_graceful_shutdown=grace, ws="none",
        )  # fmt: skip
        server = uvicorn.Server(config)
        # These handlers take a signal that comes before uvicorn sets its own handlers, and the one that uvicorn raises
        # again after its end, when the engine has still to end.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(server, "should_exit", True))
        listener.listen(config.backlog)
        print(address(listener), flush=True)
        server.run(sockets=[listener])
        say("serve: ended")


def bound(host: str, port: int) -> socket.socket:
    """A socket that is bound to the address and does not listen yet.

    Raises:
        Ling3Error: This machine has no such address, or it is taken.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise Ling3Error(
            f"address `{host}:{port}`: expected one that is free here, found {error.strerror or error}",
            "take another with --host and --port; port 0 is any free one",
        ) from error
    return listener


def address(listener: socket.socket) -> str:
    """The URL under which clients reach a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def api_key(file: Path | None) -> str | None:
    """The key in ``file``, else the one in LING3_API_KEY, else None.

    Raises:
        Ling3Error: The key is empty, or has other characters than printable ASCII without blanks.
    """
    if file is not None:
        try:
            where, key = f"--api-key-file `{file}`", file.read_text().strip()
        except UnicodeDecodeError:
            where, key = f"--api-key-file `{file}`", ""
    elif "LING3_API_KEY" in os.environ:
        where, key = "`LING3_API_KEY`", os.environ["LING3_API_KEY"].strip()
    else:
        return None
    if not key or not all("!" <= character <= "~" for character in key):
        raise Ling3Error(f"{where}: expected a key of printable ASCII without blanks, found none")
    return key

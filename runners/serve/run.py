"""The life of a server: it binds its port, loads the artifact, then serves clients until a signal ends it."""

import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.extras import install, lacking
from ling3export.machine.service import is_loopback
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.validation import generation_defaults
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.hosts.rendezvous import announced
from ling3export.runners.load.loader import say
from ling3export.runners.serve.app import Policy, application
from ling3export.runners.serve.config import ServerConfig

LINGER = 5.0  # seconds that the server still answers when another host is gone, so that clients hear why
BACKLOG = 512  # connections that the system keeps until they are taken
KEEP_ALIVE = 75  # seconds that a connection may wait for its next request
LAST = 5.0  # seconds that threads have to end after the last answer
SPARE = 64  # files, except connections, that a server may open, connections that were just taken or ended among them


def opened(config: ServerConfig, model: str, max_requests: int | None) -> tuple[socket.socket, Policy]:
    """A socket that is bound where clients will connect, and what they may ask for.

    Raises:
        Ling3Error: The address is taken or not of this machine, or the file with the key has none.
    """
    key = api_key(config.api_key_file)
    listener = bound(config.host, config.port)
    most = sys.maxsize if max_requests is None else max_requests
    names = own_names(listener, config.allow_host)
    return listener, Policy(model, key, most, config.max_body, names, config.allow_origin, page=True)


def serve(artifact: Path, config: ServerConfig, engine_config: EngineConfig, hosts: Hosts | None = None) -> None:
    """Serves an artifact until SIGTERM or SIGINT; prints its address once clients may connect.

    On several hosts, this is the first and the others follow it. When one of them is gone, calls get 503 for LINGER
    seconds, then the process ends.

    At the signal it takes no new connections; calls that run have ``config.grace`` seconds to end, then they are
    cancelled, and their clients get an error. The process ends LAST seconds later at most, whatever its threads do.

    Raises:
        Ling3Error: The address cannot be had, or the artifact cannot be loaded.
    """
    logging.basicConfig(format="%(levelname)s: %(name)s: %(message)s", level=logging.WARNING)  # to stderr
    with announced(hosts):
        name = config.model or artifact.resolve().name.removesuffix(".ling3")
        listener, policy = opened(config, name, engine_config.max_requests)
        if (transfer := engine_config.transfer) is not None:
            port = listener.getsockname()[1]
            engine_config = replace(engine_config, transfer=replace(transfer, port=port))
        events = None
        if config.kv_events is not None:
            from ling3export.runners.serve.kv_events import Publisher  # with zmq, which few servers need

            events = Publisher(config.kv_events)
    tell = None if events is None else events.tell
    with (
        listener,
        closing(events) if events is not None else nullcontext(),
        Engine(artifact, engine_config, hosts=hosts, tell=tell, linger=LINGER) as engine,
    ):
        engine.settle()  # a client's first request must not wait for a program, and none may fail later
        if engine.files.exist:
            # A broken tokenizer fails here, not at the first client.
            engine.files.tokenizer("text in")
            say(f"serve: {'a' if engine.files.chats else 'no'} chat template")
        else:
            say("serve: no tokenizer: prompts and answers are token ids")
        if lacking("llguidance"):
            say(f"serve: no answers that follow a schema, a regex or a grammar; {install('structured')}")
        defaults = generation_defaults(engine.files.generation_config() if config.generation_config == "auto" else {})
        settings = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        of = f"{settings}, as generation_config.json says" if settings else "those of OpenAI's API"
        say(f"serve: settings of requests that name none: {of}")
        policy = replace(policy, max_new_tokens=defaults.pop("max_new_tokens", None), defaults=defaults)
        host = listener.getsockname()[0]
        if not is_loopback(host) and policy.api_key is None:
            say(f"serve: {host} may be reached by other machines, and no key is asked for: see --api-key-file")
        if events is not None and not is_loopback(events.host):
            say(f"serve: who reaches {events.host} reads in the events which tokens prompts have: see --kv-events")
        server = http_server(application(engine, policy, events), affordable(config.max_connections), config.grace)
        begin(server, listener)
        server.run(sockets=[listener])
        say("serve: ended")
        last = threading.Timer(LAST, os._exit, [0])  # a thread that never returns would keep the process
        last.daemon = True
        last.start()


def http_server(app: ASGIApp, connections: int, grace: float) -> uvicorn.Server:
    """A server of ``app`` for at most ``connections`` at once, which ends as ``serve`` describes."""
    # The same event loop and the same parser wherever it runs: uvicorn would take others where they are installed.
    config = uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        backlog=BACKLOG,
        limit_concurrency=connections,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=cast("int", grace),
        log_config=None,
        access_log=False,
        server_header=False,
    )
    return uvicorn.Server(config)


def begin(server: uvicorn.Server, listener: socket.socket) -> None:
    """Lets signals end ``server`` and clients connect to ``listener``, and prints its address."""
    # These handlers take a signal that comes before uvicorn sets its own handlers, and the one that uvicorn raises
    # again after its end, when more has still to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    listener.listen(BACKLOG)
    print(address(listener), flush=True)


def affordable(connections: int) -> int:
    """``connections``, but no more than this process may still open files."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd")) - SPARE
    if connections <= most:
        return connections
    say(f"serve: {max(most, 1)} connections at once instead of {connections}: few files may be open (ulimit -n)")
    return max(most, 1)


def own_names(listener: socket.socket, more: Sequence[str]) -> frozenset[str] | None:
    """The names by which clients may call a server: ``more``, and those of this machine where it listens there only.

    None, which is any, where others can reach it and no names are given.
    """
    host = listener.getsockname()[0]
    if not is_loopback(host):
        return frozenset(name.lower() for name in more) or None
    return frozenset({"localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host, *map(str.lower, more)})


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
        raise Ling3Error(f"{where}: the key must be printable ASCII without blanks")
    return key

"""``ling3-runner route``. Imports no server before it is to run."""

from pathlib import Path

import click

from ling3export.runners import flight
from ling3export.runners.cli.errors import require
from ling3export.runners.cli.options import Command, section


@click.command(cls=Command)
@section(
    "Servers",
    click.option("--prefill", multiple=True, metavar="URL", help="One with --role prefill or both; again for more."),
    click.option("--decode", multiple=True, required=True, metavar="URL", help="One that answers; again for more."),
    click.option(
        "--weight", type=click.FloatRange(0), default=1.0, help="Of what a server knows of a prompt, against its load."
    ),
    click.option(
        "--max-local-prefill",
        type=click.IntRange(0),
        default=0,
        metavar="TOKENS",
        help="Prompts that lack no more than these are prefilled where they are decoded.",
    ),
    click.option(
        "--max-queue",
        type=click.IntRange(1),
        default=64,
        metavar="REQUESTS",
        help="And so is any while each server that prefills has so many.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        default=600.0,
        metavar="SECONDS",
        help="Give a server up that sends nothing for so long.",
    ),
)
@section(
    "Clients",
    click.option("--host", default="127.0.0.1", help="Address to listen at; by default only this machine's."),
    click.option("--port", type=click.IntRange(0, 65535), default=8080, help="0 takes a free one."),
    click.option(
        "--allow-host",
        multiple=True,
        help="Name by which clients may call, beside this machine's; again for more.  [default: with --host of others, "
        "any]",
    ),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with the key of clients and servers.  [default: the key in LING3_API_KEY, if set]",
    ),
    click.option("--max-body", type=click.IntRange(1), default=4 << 20, help="Bytes of a request; more get 413."),
    click.option("--max-connections", type=click.IntRange(1), default=512, help="Connections at once."),
    click.option("--grace", type=click.IntRange(0), default=30, help="Seconds that calls have to end after SIGTERM."),
)
def route(
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    weight: float,
    max_local_prefill: int,
    max_queue: int,
    timeout: float,
    host: str,
    port: int,
    allow_host: tuple[str, ...],
    api_key_file: Path | None,
    max_body: int,
    max_connections: int,
    grace: int,
) -> None:
    """Send requests on to servers: prompts to those that prefill, answers from those that decode."""
    require("route", "serve", "starlette", "uvicorn", "prometheus_client", "pydantic", "h11", "msgspec", "zmq")
    with flight.watched():
        from ling3export.runners.route.app import Choice, Router, serve, workers_of
        from ling3export.runners.serve.app import Policy
        from ling3export.runners.serve.connection import Bounds
        from ling3export.runners.serve.run import api_key, bound, own_names

        key = api_key(api_key_file)
        how = Choice(weight, most_local=max_local_prefill, most_queued=max_queue)
        router = Router(workers_of(prefill, key, timeout), workers_of(decode, key, timeout), how)
        listener = bound(host, port)
        policy = Policy("", key, max_connections, max_body, own_names(listener, allow_host))
        serve(router, policy, listener, Bounds(max_connections), grace)

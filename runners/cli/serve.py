"""The commands that serve over HTTP, ``serve`` and ``route``, and ``ffn-worker``, which computes experts for them.

Imports neither jax nor the server before it is to run.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click

from ling3export.foundation.extras import require
from ling3export.runners.cli.command import Command, section
from ling3export.runners.cli.hosts import leading
from ling3export.runners.cli.options import PORT, POSITIVE, SECONDS, engine_options, field_option, target_option
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.hosts.rendezvous import announced
from ling3export.runners.serve.config import ServerConfig

COUNT = click.IntRange(0)
_option = partial(field_option, ServerConfig)


def server_options(port: int = ServerConfig.port) -> Callable[..., Any]:
    """Gives a command the options of ServerConfig that every server has; it gets the configuration as ``server``."""

    def add(command: Callable[..., Any]) -> Any:
        @wraps(command)
        def configured(**options: Any) -> Any:
            settings = {field.name: options.pop(field.name) for field in fields(ServerConfig) if field.name in options}
            return command(server=ServerConfig(**settings), **options)

        limits = section(
            "Limits",
            _option("max_body", POSITIVE, "Bytes of a request; more get 413."),
            _option(
                "max_connections",
                POSITIVE,
                "Connections at once; one more ends the one that waits longest for its client, else gets 503.",
            ),
            _option("grace", COUNT, "Seconds that running requests have to end after SIGTERM."),
        )
        return section(
            "Clients",
            _option("host", None, "Address to listen at; by default only this machine's."),
            _option("port", PORT, "Port to listen at; 0 takes a free one.", port),
            _option(
                "api_key_file",
                click.Path(path_type=Path, dir_okay=False),
                "File with the key that clients send as bearer token.  [default: the key in LING3_API_KEY, if set]",
            ),
            _option(
                "allow_host",
                None,
                "Name by which clients may call, beside this machine's; again for more.  [default: with --host of "
                "others, any]",
                multiple=True,
            ),
            _option(
                "allow_origin",
                None,
                "Origin of a page that browsers may let call, such as https://example.org; again for more, * for any.  "
                "[default: this server's page alone]",
                multiple=True,
                metavar="ORIGIN",
            ),
        )(limits(configured))

    return add


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT)
@server_options()
@section(
    "Clients",
    _option(
        "generation_config",
        click.Choice(["auto", "none"]),
        "Sampling where a request does not say: the checkpoint's generation_config.json, or OpenAI's defaults.",
    ),
    _option("model", None, "Name that clients ask for.  [default: the artifact's, without .ling3]"),
)
@section(
    "Events",
    _option(
        "kv_events",
        None,
        "Tell routers what prompts hit here, in vLLM's format: tcp://127.0.0.1:5557 and the next port for what "
        "was missed; port 0 takes free ones.  [default: nobody is told]",
        metavar="ENDPOINT",
    ),
)
@engine_options(
    "max_requests",
    "target",
    "programs",
    "check",
    "step_timeout",
    "ffn",
    "prefix_cache",
    "prefix_store",
    "transfer",
    max_requests=256,
)
def serve(artifact: Path, server: ServerConfig, engine: EngineConfig) -> None:
    """Serve ARTIFACT over HTTP, in the shapes of OpenAI's API.

    On several hosts, run the same command on each; host 0 listens for clients.
    """
    hosts = leading(artifact, engine, grace=server.grace)
    with announced(hosts):
        require("serve", "serve", "starlette", "uvicorn", "prometheus_client", "pydantic")
        if server.kv_events is not None:
            require("--kv-events", "serve", "zmq")
        from ling3export.runners.serve.run import serve as run
    run(artifact, server, engine, hosts)


@click.command(cls=Command)
@section(
    "Servers",
    click.option(
        "--prefill",
        multiple=True,
        metavar="URL",
        help="A server that prefills, with --role prefill or both; again for more.",
    ),
    click.option(
        "--decode", multiple=True, required=True, metavar="URL", help="A server that answers; again for more."
    ),
    click.option(
        "--max-local-prefill",
        type=COUNT,
        default=0,
        metavar="TOKENS",
        help="Prompts of no more tokens than these are prefilled where they are decoded.",
    ),
    click.option(
        "--max-queue",
        type=POSITIVE,
        default=64,
        metavar="REQUESTS",
        help="Once each server of --prefill has this many requests, --decode servers compute prompts, too.",
    ),
    click.option(
        "--timeout", type=SECONDS, default=600.0, metavar="SECONDS", help="Give up a server that is silent for so long."
    ),
)
@server_options(port=8080)
def route(
    server: ServerConfig,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    max_local_prefill: int,
    max_queue: int,
    timeout: float,
) -> None:
    """Send requests on to servers: prompts to those that prefill, answers from those that decode."""
    require("route", "serve", "starlette", "uvicorn", "prometheus_client", "pydantic", "h11")
    from ling3export.runners.route.app import Router, RoutingPolicy, workers_of
    from ling3export.runners.route.app import serve as run
    from ling3export.runners.serve.run import opened

    listener, policy = opened(server, "", server.max_connections)
    routing = RoutingPolicy(most_local=max_local_prefill, most_queued=max_queue)
    router = Router(workers_of(prefill, policy.api_key, timeout), workers_of(decode, policy.api_key, timeout), routing)
    run(router, policy, listener, server.max_connections, server.grace)


@click.command("ffn-worker", cls=Command)
@click.argument("artifact", type=ARTIFACT)
@click.option("--context", required=True, metavar="NAME", help="The worker's name, for --ffn.")
@section("Artifact", target_option)
def ffn_worker(artifact: Path, context: str, **options: Any) -> None:
    """Compute ARTIFACT's experts for one attention process (experimental).

    That is generate or serve with --ffn, on this machine. Ends once it has left.
    """
    from ling3export.runners.ffn.worker import FfnWorker

    FfnWorker(artifact, context, **options).run()

"""``ling3-runner serve``. Imports neither jax nor the server before it is to run."""

from pathlib import Path
from typing import Any

import click

from ling3export.runners.cli.errors import require
from ling3export.runners.cli.ffn import ffn_options
from ling3export.runners.cli.hosts import host_options, leading
from ling3export.runners.cli.options import Command, artifact_options, prefix_options, section
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.cli.roles import exchanging, transfer_options
from ling3export.runners.hosts.rendezvous import announced
from ling3export.runners.transfer.options import PrefixFolder


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT)
@section(
    "Clients",
    click.option("--host", default="127.0.0.1", help="Address to listen at; by default only this machine's."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0 takes a free one."),
    click.option(
        "--allow-host",
        multiple=True,
        help="Name by which clients may call, beside this machine's; again for more.  [default: with --host of others, "
        "any]",
    ),
    click.option("--model", help="Name that clients ask for.  [default: the artifact's, without .ling3]"),
    click.option(
        "--api-key-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with the key that clients send as bearer token.  [default: the key in LING3_API_KEY, if set]",
    ),
)
@section(
    "Events",
    click.option(
        "--kv-events",
        metavar="ENDPOINT",
        help="Tell routers what prompts hit here, in vLLM's format: tcp://127.0.0.1:5557 and the next port for what "
        "was missed; port 0 takes free ones.  [default: nobody is told]",
    ),
    click.option("--kv-events-topic", default="kv-events", metavar="TEXT", help="What messages begin with."),
)
@section(
    "Limits",
    click.option(
        "--max-requests", type=click.IntRange(1), default=256, help="Prompts at once, waiting ones too; more get 429."
    ),
    click.option("--max-body", type=click.IntRange(1), default=4 << 20, help="Bytes of a request; more get 413."),
    click.option(
        "--max-connections",
        type=click.IntRange(1),
        default=512,
        help="Connections at once; one more ends the one that waits longest for its client, else gets 503.",
    ),
    click.option("--grace", type=click.IntRange(0), default=30, help="Seconds that calls have to end after SIGTERM."),
    click.option("--restarts", type=click.IntRange(0), default=0, help="After failed steps, in ten minutes at most."),
)
@artifact_options
@ffn_options
@prefix_options
@transfer_options
@host_options
def serve(
    artifact: Path, host: str, port: int, allow_host: tuple[str, ...], model: str | None, api_key_file: Path | None,
    kv_events: str | None, kv_events_topic: str, max_requests: int, max_body: int, max_connections: int, grace: int,
    restarts: int, target: str | None, programs: str, check: str, step_timeout: float | None, ffn: tuple[str, ...],
    ffn_timeout: float, prefix_cache: bool | None, evict: str, prefix_store: Path | None, prefix_store_bytes: int,
    transfer: str | None, place: dict[str, Any], **transfer_settings: Any,
) -> None:  # fmt: skip
    """Serve ARTIFACT over HTTP, in the shapes of OpenAI's API.

    On several hosts, run the same command on each; host 0 listens for clients.
    """
    how: dict[str, Any] = {
        "target": target,
        "programs": programs,
        "check": check,
        "prefix_cache": prefix_cache,
        "evict": evict,
        "prefix_store": None if prefix_store is None else PrefixFolder(prefix_store, prefix_store_bytes),
    }
    exchanged = exchanging(transfer, place, transfer_settings)
    name = model or artifact.resolve().name.removesuffix(".ling3")
    hosts = leading(artifact, place, ffn=ffn, grace=grace, **how)
    with announced(hosts):
        require("serve", "serve", "starlette", "uvicorn", "prometheus_client", "pydantic")
        from ling3export.runners.serve.app import Policy
        from ling3export.runners.serve.connection import Bounds
        from ling3export.runners.serve.run import api_key, bound, own_names
        from ling3export.runners.serve.run import serve as run

        key = api_key(api_key_file)
        listener = bound(host, port)
        events = None
        if kv_events is not None:
            require("--kv-events", "serve", "msgspec", "zmq")
            from ling3export.runners.serve.kv_events import Publisher

            events = Publisher(kv_events, kv_events_topic)
    policy = Policy(name, key, max_requests, max_body, own_names(listener, allow_host))
    run(
        artifact,
        policy,
        listener,
        bounds=Bounds(max_connections),
        grace=grace,
        restarts=restarts,
        step_timeout=step_timeout,
        hosts=hosts,
        ffn=ffn,
        ffn_timeout=ffn_timeout,
        transfer=exchanged,
        events=events,
        **how,
    )

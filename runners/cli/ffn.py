"""``ling3-runner ffn-worker``, and the options by which other commands use such workers."""

import json
from pathlib import Path
from typing import Any

import click

from ling3export.foundation.errors import RequestError
from ling3export.foundation.shards import Shard
from ling3export.runners import flight
from ling3export.runners.cli.options import (
    Command,
    Once,
    check_option,
    programs_option,
    section,
    target_option,
    trust_option,
)
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.ffn import WAIT

SECONDS = click.FloatRange(0, min_open=True)
ffn_options = section(
    "Attention and FFN apart",
    click.option("--ffn", multiple=True, metavar="NAME", help="An ffn-worker's --context; again for every worker."),
    click.option(
        "--ffn-timeout",
        type=SECONDS,
        default=WAIT,
        metavar="SECONDS",
        help="Fail what runs once a worker does not come or does not answer for so long.",
    ),
)


class _Share(click.ParamType):
    """``0/2``."""

    name = "I/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Shard:
        """The share."""
        if isinstance(value, Shard):
            return value
        try:
            return Shard.parse(value, {})
        except RequestError:
            self.fail(f"expected a share I/N, found {value[:40]!r}.", param, ctx)


@click.command("ffn-worker", cls=Command)
@click.argument("artifact", type=ARTIFACT)
@section(
    "Shared memory",
    click.option("--context", cls=Once, required=True, metavar="NAME", help="What --ffn calls this worker."),
    click.option("--sessions", type=click.IntRange(1, 1024), default=1, help="Attention processes that publish to it."),
    click.option("--micro-batches", type=click.IntRange(1, 64), default=2, help="Of each session, in flight at once."),
    click.option(
        "--micro-batch-size",
        "tokens",
        type=click.IntRange(1),
        metavar="N",
        help="Tokens of a micro batch.  [default: the largest that was built]",
    ),
    click.option(
        "--schedule",
        type=click.Choice(["async", "sync"]),
        default="async",
        help="Take a micro batch from sessions that have it ready, or from all at once.",
    ),
    click.option("--share", type=_Share(), default=Shard(), help="Share of the experts, where there are N workers."),
)
@section(
    "Faults",
    click.option("--wait", type=SECONDS, default=WAIT, metavar="SECONDS", help="In which all sessions have to come."),
    click.option(
        "--timeout",
        "quiet",
        type=SECONDS,
        metavar="SECONDS",
        help="End once sessions are there and publish nothing for so long.  [default: any time]",
    ),
)
@section(
    "Output", click.option("--stats", is_flag=True, help="Print seconds and counts of each phase on stderr at the end.")
)
@section("Artifact", target_option, programs_option, check_option, trust_option)
def ffn_worker(artifact: Path, stats: bool, schedule: str, **options: Any) -> None:
    """Compute ARTIFACT's experts for attention processes.

    These are generate and serve with --ffn, on this machine. Ends once all of them have left.
    """
    with flight.watched():
        from ling3export.runners.ffn.worker import FfnWorker, stopping

        worker = FfnWorker(artifact, options.pop("context"), synchronous=schedule == "sync", **options)
        with stopping(worker):
            worker.run()
        if stats:
            click.echo(f"stats: {json.dumps(worker.phases.record())}", err=True)

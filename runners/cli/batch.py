"""``ling3-runner batch``: answers a file of requests."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ling3export.foundation.extras import require
from ling3export.foundation.shards import Shard
from ling3export.runners.cli.cluster import cluster_options
from ling3export.runners.cli.command import Command, section
from ling3export.runners.cli.hosts import leading
from ling3export.runners.cli.options import PATH, engine_options, sampling_option, shard_option, temperature_option
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.hosts.rendezvous import announced

if TYPE_CHECKING:
    from ling3export.runners.fleet.cluster import Cluster


@click.command(cls=Command)
@click.argument("artifact", type=ARTIFACT)
@click.argument("source", metavar="INPUT", type=PATH)
@click.argument("output", type=PATH)
@section(
    "Requests",
    click.option("--model", help="Name of the model in answers.  [default: the artifact's, without .ling3]"),
    click.option("--max-tokens", type=click.IntRange(1), default=256, help="For lines that do not set it."),
    temperature_option,
    sampling_option("seed", "Seed of the first line; each line has the next, unless it sets one."),
)
@section(
    "Work",
    shard_option("The I-th of N ranges of the lines"),
    click.option("--force", is_flag=True, help="Begin again, and replace OUTPUT."),
)
@engine_options("target", "programs", "check")
@cluster_options
def batch(
    artifact: Path,
    source: Path,
    output: Path,
    model: str | None,
    shard: Shard,
    force: bool,
    engine: EngineConfig,
    cluster: "Cluster | None",
    **settings: Any,
) -> None:
    """Answer each line of INPUT with a line of OUTPUT, or continue an interrupted run.

    A line is a request in OpenAI's batch format, or one of {"prompt": TEXT}, {"prompt_ids": [ID, ...]} and
    {"messages": [...]}. A line that cannot be served gets an error as its answer. OUTPUTs of all shards, one after the
    other, are the whole output.
    """
    hosts = leading(artifact, engine) if cluster is None else None
    with announced(hosts):
        require("batch", "serve", "starlette", "prometheus_client", "pydantic")
        from ling3export.runners.batch.run import run_batch, run_batch_on
    from ling3export.runners.engine.engine import Engine

    name = model or artifact.resolve().name.removesuffix(".ling3")
    options: dict[str, Any] = {"model": name, "settings": settings, "shard": shard, "force": force}
    if cluster is not None:
        summary = run_batch_on(cluster, artifact.resolve(), engine, source, output, **options)
    else:
        with Engine(artifact, engine, hosts=hosts) as running:
            summary = run_batch(running, source, output, **options)
    earlier = f", {summary.earlier} of them by an earlier run" if summary.earlier else ""
    click.echo(
        f"{output}: {summary.answered} lines of shard {shard}{earlier}; refused now: {summary.refused}", err=True
    )

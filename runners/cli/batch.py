"""``ling3-runner batch``: a file of requests, answered in shards."""

from pathlib import Path
from typing import Any

import click

from ling3export.foundation.extras import require
from ling3export.foundation.shards import Shard
from ling3export.runners.cli.cluster import cluster_options, on_cluster
from ling3export.runners.cli.command import Group, section
from ling3export.runners.cli.hosts import host_options, leading
from ling3export.runners.cli.options import PATH, engine_options, sampling_option, shard_option, temperature_option
from ling3export.runners.cli.references import ARTIFACT
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.fleet.cluster import Cluster
from ling3export.runners.hosts.rendezvous import announced

COMMON = "model max_tokens temperature seed shard force target programs on replicas".split()


class _BatchGroup(Group):
    """``batch ARTIFACT INPUT OUTPUT`` is short for ``batch run ARTIFACT INPUT OUTPUT``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args.insert(0, "run")
        return super().parse_args(ctx, args)


@click.group("batch", cls=_BatchGroup, sections={"Commands": ("run", "merge")})
def batch() -> None:
    """Answer a file of requests; merge the answers of shards.

    `batch ARTIFACT INPUT OUTPUT` is short for `batch run`.
    """


@batch.command(from_file=True, common=COMMON)
@click.argument("artifact", type=ARTIFACT)
@click.argument("source", metavar="INPUT", type=PATH)
@click.argument("output", type=PATH)
@section(
    "Requests",
    click.option("--model", help="Name of the model in answers.  [default: the artifact's, without .ling3]"),
    click.option("--max-tokens", type=click.IntRange(1), default=256, help="Where a line does not say it."),
    temperature_option,
    sampling_option("seed", "Seed of the first line; each line has the next, unless it says one."),
)
@section(
    "Work", shard_option("line"), click.option("--force", is_flag=True, help="Begin anew, whatever OUTPUT is there.")
)
@engine_options("target", "programs", "check", "step_timeout")
@host_options
@cluster_options
def run(
    artifact: Path,
    source: Path,
    output: Path,
    model: str | None,
    shard: Shard,
    force: bool,
    engine: EngineConfig,
    place: dict[str, Any],
    cluster: Cluster | None,
    **settings: Any,
) -> None:
    """Answer each line of INPUT with a line of OUTPUT, or go on where an earlier run was broken off.

    A line is a request in OpenAI's batch format, or one of {"prompt": TEXT}, {"prompt_ids": [ID, ...]} and
    {"messages": [...]}. A line that cannot be served gets an error as its answer.
    """
    hosts = leading(artifact, place, engine) if cluster is None else None
    with announced(hosts):
        require("batch", "serve", "starlette", "prometheus_client", "pydantic")
        from ling3export.runners.batch.run import answer_file, answered_by, batch_worker, run_batch
    from ling3export.runners.engine.engine import Engine

    name = model or artifact.resolve().name.removesuffix(".ling3")
    what: dict[str, Any] = {"model": name, "settings": settings, "shard": shard, "force": force}
    if cluster is not None:
        with on_cluster("batch", cluster, batch_worker(artifact.resolve(), engine), at_once=2) as pool:
            done = answer_file(pool.about["artifact"], answered_by(pool), source, output, **what)
    else:
        with Engine(artifact, engine, hosts=hosts) as running:
            done = run_batch(running, source, output, **what)
    earlier = f", {done.earlier} of them by an earlier run" if done.earlier else ""
    click.echo(f"{output}: {done.answered} lines of shard {shard}{earlier}; refused now: {done.refused}", err=True)


@batch.command()
@click.argument("shards", nargs=-1, required=True, metavar="OUTPUT...", type=PATH)
@click.option("--to", "output", required=True, type=PATH, help="Where all answers go.")
@click.option("--force", is_flag=True, help="Replace it if it is there.")
def merge(shards: tuple[Path, ...], output: Path, force: bool) -> None:
    """Put the OUTPUTs of all shards of one run together, in the order of the input."""
    from ling3export.runners.batch.run import merge as merged

    lines = merged(shards, output, force=force)
    click.echo(f"{output}: {lines} lines of {len(shards)} shards", err=True)

"""``python -m bench``: what is measured, and how often."""

from pathlib import Path

import click

CHECKPOINT = click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True),
    help="Checkpoint to measure.  [default: small, 24 layers]",
)
ROUNDS = click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Medians of this many.")


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Measure; without a command, everything. A table and a line of JSON on stdout for each."""
    if context.invoked_subcommand is None:
        context.invoke(every)


@main.command()
@CHECKPOINT
@ROUNDS
def startup(checkpoint: Path | None, rounds: int) -> None:
    """Process start to first token, against jit cold and with a warm cache."""
    from bench.startup import main as run

    run(checkpoint, rounds)


@main.command()
@CHECKPOINT
@ROUNDS
@click.option("--context", default=512, show_default=True, help="Tokens a sequence holds when decoding starts.")
@click.option("--tp", "tps", default="1,16", show_default=True, help="Parallelism of our side.")
@click.option("--batches", default="1,16", show_default=True, help="Sequences that transformers decodes.")
@click.option("--peers", default="default,eager", show_default=True, help="Expert implementations of transformers.")
@click.option("--max-running", default=64, show_default=True, help="Sequences that our side has state for.")
@click.option("--kernels", default="auto", show_default=True, help="What --kernels builds have on our side: auto,off.")
def speed(
    checkpoint: Path | None,
    rounds: int,
    context: int,
    tps: str,
    batches: str,
    peers: str,
    max_running: int,
    kernels: str,
) -> None:
    """Prefill and decode tokens/s against transformers, memory bandwidth and dispatch."""
    from bench.inputs import numbers
    from bench.speed import main as run

    run(
        checkpoint,
        rounds,
        context=context,
        tps=numbers(tps),
        batches=numbers(batches),
        peers=[peer for peer in peers.split(",") if peer],
        max_running=max_running,
        kernels=kernels.split(","),
    )


@main.command()
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), help="[default: one of full width]")
@click.option("--layers", default=12, show_default=True, help="Of the default checkpoint; 12 are 8.1 GB.")
@ROUNDS
@click.option("--llama-cpp", type=click.Path(path_type=Path, exists=True), required=True, help="As `make peers` says.")
@click.option("--kernels", default="auto", show_default=True, help="What --kernels builds have on our side: auto,off.")
@click.option("--transformers/--no-transformers", default=True, show_default=True, help="Needs `make parity`.")
def peers(checkpoint: Path | None, layers: int, rounds: int, llama_cpp: Path, kernels: str, transformers: bool) -> None:
    """Our engine against llama.cpp and transformers; not part of all."""
    from bench.peers import main as run

    run(checkpoint, layers, rounds, llama_cpp.resolve(), kernels.split(","), transformers)


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path, exists=True))
@ROUNDS
def cold(artifact: Path, rounds: int) -> None:
    """The first token of a process that finds nothing of the artifact in memory; not part of all."""
    from bench.cold import main as run

    run(artifact, rounds)


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path, exists=True))
@ROUNDS
@click.option("--counts", default="1,2,4,8,16", show_default=True, help="Sequences of a decode step.")
def steps(artifact: Path, rounds: int, counts: str) -> None:
    """The programs of an artifact alone, and what padding costs a decode step; not part of all."""
    from bench.inputs import numbers
    from bench.steps import main as run

    run(artifact, rounds, numbers(counts))


@main.command()
@click.argument("first", type=click.Path(path_type=Path, exists=True))
@click.argument("second", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", type=click.IntRange(2), default=8, show_default=True, help="The first one is dropped.")
@click.option("--counts", default="1,4,16", show_default=True, help="Sequences that decode at once.")
def pair(first: Path, second: Path, rounds: int, counts: str) -> None:
    """A decode step of two artifacts, in turn in one process; not part of all."""
    from bench.inputs import numbers
    from bench.pair import main as run

    run(first, second, rounds, numbers(counts))


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), help="[default: small, 24 layers]")
@ROUNDS
@click.option("--requests", default=40, show_default=True, help="Of each run.")
@click.option("--llama-cpp", type=click.Path(path_type=Path, exists=True), help="As `make peers` says.")
@click.option("--transformers/--no-transformers", default=True, show_default=True)
def witness(
    folder: Path, checkpoint: Path | None, rounds: int, requests: int, llama_cpp: Path | None, transformers: bool
) -> None:
    """Our server by our client and by aiperf, beside other servers; not part of all. `.ci/witness` made FOLDER."""
    from bench.witness import main as run

    run(
        checkpoint,
        rounds,
        requests,
        folder / "aiperf" / "bin" / "aiperf",
        llama_cpp and llama_cpp.resolve(),
        folder / "transformers" / "bin" / "python" if transformers else None,
    )


@main.command()
@ROUNDS
@click.option("--layers", default=2, show_default=True, help="Expert layers of the full size; 2 are 1.8 GB.")
@click.option("--folder", type=click.Path(path_type=Path, exists=True), help="A volume that holds twice the bytes.")
@click.option("--threads", default=2, show_default=True)
def store(rounds: int, layers: int, folder: Path | None, threads: int) -> None:
    """Writing and checking the weight store against copying its bytes."""
    from bench.store_copy import main as run

    run(folder, layers, rounds, threads)


@main.command()
@CHECKPOINT
@click.option("--hosts", type=click.IntRange(2), default=4, show_default=True, help="Of one device each.")
def ranks(checkpoint: Path | None, hosts: int) -> None:
    """What each host takes of the weights (4 layers of the full size), and its memory, against loading all of them."""
    from bench.ranks import main as run

    run(checkpoint, hosts)


@main.command()
@click.argument("first", type=click.Path(path_type=Path, exists=True))
@click.argument("programs", type=click.Path(path_type=Path, exists=True), required=False)
@click.argument("weights", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--hosts", type=click.Path(path_type=Path, exists=True), help="An artifact of several hosts.")
@ROUNDS
@click.option("--megabytes", default=1024, show_default=True, help="More weights of FIRST, for the times.")
def catalog(
    first: Path, programs: Path | None, weights: Path | None, hosts: Path | None, rounds: int, megabytes: int
) -> None:
    """Bytes that pulls move, and pulling against copying.

    FIRST is published first, then PROGRAMS, which has the same weights, then WEIGHTS, which has the programs of FIRST.
    With FIRST alone little more than the times is measured.
    """
    from bench.catalog import main as run

    run(first, programs, weights, hosts, rounds, megabytes)


@main.command()
@click.option("--target", default="tpu:v6e:4x4", show_default=True)
@click.option("--jobs", type=click.IntRange(1), help="Cells compiled at a time.  [default: one a core]")
def cells(target: str, jobs: int | None) -> None:
    """Compiling every cell of the default plan at full size for a machine that is not here."""
    from bench.cells import main as run

    run(target, jobs)


@main.command()
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), help="[default: the demo checkpoint]")
@ROUNDS
@click.option("--tp", "tps", default="1,16", show_default=True, help="Parallelism of our side.")
@click.option("--counts", default="1,16,64", show_default=True, help="Requests at once.")
@click.option("--peer/--no-peer", default=True, show_default=True, help="Also transformers; needs `make parity`.")
def engine(checkpoint: Path | None, rounds: int, tps: str, counts: str, peer: bool) -> None:
    """Requests at once against a naive loop and transformers' generate; gaps while a long prompt arrives."""
    from bench.engine import main as run
    from bench.inputs import numbers

    run(checkpoint, rounds, tps=numbers(tps), counts=numbers(counts), peer=peer)


@main.command()
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), help="[default: the demo checkpoint]")
@click.option("--requests", default=2000, show_default=True)
@click.option("--tp", default=1, show_default=True)
def soak(checkpoint: Path | None, requests: int, tp: int) -> None:
    """Requests that come, finish and leave: slots, pages, threads and memory afterwards."""
    from bench.soak import main as run

    run(checkpoint, requests, tp)


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path, exists=True))
def demo(artifact: Path) -> None:
    """An answer of the packaged demo, its score on held-out problems, and its start against jit; not part of all."""
    from bench.demo import main as run

    run(artifact)


@main.command()
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), help="[default: the demo checkpoint]")
@click.option("--clients", type=click.IntRange(1), default=200, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=60, show_default=True)
@click.option("--max-requests", type=click.IntRange(1), default=150, show_default=True, help="Of the server.")
@click.option("--tp", default=1, show_default=True)
@click.option("--faults", is_flag=True, help="Some prompts cannot fit, and some calls break off.")
def serve(checkpoint: Path | None, clients: int, seconds: float, max_requests: int, tp: int, faults: bool) -> None:
    """A server under many clients at once: answers, 429, times; fails on anything else."""
    from bench.serve import main as run

    run(checkpoint, clients, seconds, max_requests, tp, faults)


@main.command("serve-gap")
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True), help="[default: the demo checkpoint]")
@click.option("--clients", type=click.IntRange(1), default=50, show_default=True)
@click.option("--seconds", type=click.FloatRange(1), default=20, show_default=True, help="Of each phase.")
@click.option("--apart", is_flag=True, help="Half of the processors for the server, the others for its clients.")
def serve_gap(checkpoint: Path | None, clients: int, seconds: float, apart: bool) -> None:
    """The longest gap of /health and of a stream while many send 4 MB that cannot fit, and while nobody does."""
    from bench.serve_gap import main as run

    run(checkpoint, clients, seconds, apart)


@main.command()
@click.option("--artifact", type=click.Path(path_type=Path, exists=True), help="Built with --afd, in float32.")
@CHECKPOINT
@click.option("--ways", default="1x1x2", show_default=True, help="Sessions x workers x micro batches,…; or none.")
def afd(artifact: Path | None, checkpoint: Path | None, ways: str) -> None:
    """Attention and FFN apart: phases, bytes, idle shares against the fused step; on paper, where the split pays."""
    from bench.afd import main as run

    each = [] if ways == "none" else [tuple(map(int, way.split("x"))) for way in ways.split(",")]
    run(artifact, checkpoint, [(sessions, workers, micro) for sessions, workers, micro in each])


@main.command()
@ROUNDS
@click.option("--tokens", type=click.IntRange(1), default=512, show_default=True, help="Of the sequence.")
@click.option("--ptp", default=2, show_default=True, help="Ranks that write.")
@click.option("--dtp", default=4, show_default=True, help="Ranks that read.")
def transfer(rounds: int, tokens: int, ptp: int, dtp: int) -> None:
    """A sequence's state through each backend into another process, against copying its bytes."""
    from bench.transfer import main as run

    run(rounds, tokens, ptp, dtp)


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path, exists=True))
@click.option("--transfer", "carrier", type=click.Choice(("shm", "tcp", "file")), default="shm", show_default=True)
@click.option("--vllm-router", is_flag=True, help="vLLM's router in the place of ours.")
@click.option("--prompts", type=click.IntRange(1, 8), default=8, show_default=True)
@click.option("--replicas", default="1,1", show_default=True, help="Servers that prefill, and that decode.")
def pd(artifact: Path, carrier: str, vllm_router: bool, prompts: int, replicas: str) -> None:
    """Prompts through servers that prefill, some that decode and a router; not part of all."""
    from bench.inputs import numbers
    from bench.pd import main as run

    prefill, decode = numbers(replicas)
    run(artifact.resolve(), carrier, vllm_router, prompts, (prefill, decode))


@main.command()
@click.option("--artifact", type=click.Path(path_type=Path, exists=True), help="[default: one of the demo checkpoint]")
@click.option("--replicas", default="1,3", show_default=True, help="Numbers of replicas.")
@click.option("--seconds", type=click.FloatRange(0.1), default=3, show_default=True, help="Of each measure of calls.")
@click.option("--kept", type=click.Path(path_type=Path), help="A folder: what is there is not measured again.")
@click.option("--part", "parts", multiple=True, help="Measure this alone, such as times-2 or 3@0.8, with --kept.")
@click.option("--cores", type=click.IntRange(1), help="Of each replica alone.  [default: all share the machine's]")
@click.option(
    "--device-ms",
    "device",
    type=(click.FloatRange(0), click.FloatRange(0), click.FloatRange(0)),
    metavar="CALL TOKEN ROW",
    help="A device in the processor's place: ms of a call, and more a padded token of prefill and a row of decode.",
)
@click.option("--requests", type=click.IntRange(1), default=40, show_default=True, help="The fewest of a run.")
def fleet(
    artifact: Path | None,
    replicas: str,
    seconds: float,
    kept: Path | None,
    parts: tuple[str, ...],
    cores: int | None,
    device: tuple[float, float, float] | None,
    requests: int,
) -> None:
    """A simulated fleet against real replicas on this machine; needs the extra fleet."""
    from bench.fleet import main as run
    from bench.fleet_ours import Speed
    from bench.inputs import numbers

    run(artifact, numbers(replicas), seconds, kept, parts, cores, Speed(*device) if device else None, requests)


@main.command("fleet-scale")
@click.option("--plots", type=click.Path(path_type=Path), default="docs/fleet", show_default=True, help="A folder.")
@click.option("--requests", type=click.IntRange(100), default=1_000_000, show_default=True, help="Of the last run.")
@click.option(
    "--from", "artifact", type=click.Path(path_type=Path, exists=True), help="Whose estimates price paddings."
)
def fleet_scale(plots: Path, requests: int, artifact: Path | None) -> None:
    """1,000 chips and 10^6 requests, simulated: ratio of prefill to decode, paddings, router; draws the plots."""
    from bench.fleet_scale import main as run

    run(plots, requests, artifact)


@main.command("all")
@click.pass_context
def every(context: click.Context) -> None:
    """Everything, with the defaults."""
    for command in (startup, speed, store, engine, soak, serve, cells, transfer):
        context.invoke(command)


if __name__ == "__main__":
    main(prog_name="python -m bench")

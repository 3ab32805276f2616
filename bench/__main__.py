"""``python -m bench``: the measurements whose figures README and docs show."""

from pathlib import Path
from typing import Any

import click

from bench.inputs import numbers

PATH = click.Path(path_type=Path, exists=True)
ROUNDS = click.option(
    "--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds that the medians are taken over."
)
LLAMA = click.option("--llama-cpp", type=PATH, help="The folder that `make peers` prints.")
TRANSFORMERS = click.option("--transformers/--no-transformers", default=True, show_default=True)
CHECKPOINT = click.option("--checkpoint", type=PATH, help="[default: one of full width]")
LAYERS = click.option(
    "--layers", default=12, show_default=True, help="Layers of the default checkpoint; 12 take 8.1 GB."
)


@click.group()
def main() -> None:
    """Measure. A table and a line of JSON on stdout for each."""


@main.command()
@CHECKPOINT
@LAYERS
@ROUNDS
@click.option("--llama-cpp", type=PATH, required=True, help="The folder that `make peers` prints.")
@click.option("--kernels", default="auto", show_default=True, help="Values of `build --kernels` on our side: auto,off.")
@TRANSFORMERS
@click.option(
    "--weights",
    default="bf16",
    show_default=True,
    help="Forms of weights: bf16,int8,int4,int4-small, each with theirs.",
)
def peers(
    checkpoint: Path | None, layers: int, rounds: int, llama_cpp: Path, kernels: str, transformers: bool, weights: str
) -> None:
    """Our engine against llama.cpp and transformers, which needs `make parity`."""
    from bench.peers import measure, report

    arms = kernels.split(","), transformers, weights.split(",")
    report(measure(checkpoint, layers, rounds, llama_cpp.resolve(), *arms))


@main.command("long")
@CHECKPOINT
@LAYERS
@ROUNDS
@LLAMA
@click.option(
    "--lengths", default="1024,8192,16384,32768", show_default=True, help="Tokens of prompts, ascending, from 1024 on."
)
@click.option("--only", type=click.Choice(["ling3export", "llama.cpp"]), help="One of the two: a run may be in pieces.")
def long_prompts(
    checkpoint: Path | None, layers: int, rounds: int, llama_cpp: Path | None, lengths: str, only: str | None
) -> None:
    """Cost of a prefill token and of a decode step after long prompts, in our engine and in llama.cpp."""
    from bench.long import main as run

    run(checkpoint, layers, numbers(lengths), rounds, llama_cpp and llama_cpp.resolve(), only)


@main.command()
@click.argument("folder", type=PATH)
@click.option("--checkpoint", type=PATH, help="[default: small, 24 layers]")
@ROUNDS
@click.option("--requests", default=40, show_default=True, help="Requests of each run.")
@LLAMA
@TRANSFORMERS
def witness(
    folder: Path, checkpoint: Path | None, rounds: int, requests: int, llama_cpp: Path | None, transformers: bool
) -> None:
    """Our server measured by our client and by aiperf, next to other servers. `.ci/witness` made FOLDER."""
    from bench.witness import main as run

    aiperf, python = (folder / part / "bin" for part in ("aiperf", "transformers"))
    theirs = python / "python" if transformers else None
    run(checkpoint, rounds, requests, aiperf / "aiperf", llama_cpp and llama_cpp.resolve(), theirs)


@main.command()
@click.argument("artifact", type=PATH)
def demo(artifact: Path) -> None:
    """Run the packaged demo: an answer, its score on held-out problems, and its start-up time against jit."""
    from bench.demo import main as run

    run(artifact)


@main.command()
@click.argument("artifact", type=PATH)
@click.option("--transfer", "carrier", type=click.Choice(("shm", "http", "file")), default="shm", show_default=True)
@click.option("--vllm-router", is_flag=True, help="vLLM's router in the place of ours.")
@click.option("--prompts", type=click.IntRange(1, 8), default=8, show_default=True)
@click.option("--replicas", default="1,1", show_default=True, help="Servers that prefill, and that decode.")
def pd(artifact: Path, carrier: str, vllm_router: bool, prompts: int, replicas: str) -> None:
    """Send prompts through servers that prefill, servers that decode, and a router."""
    from bench.pd import main as run

    prefill, decode = numbers(replicas)
    run(artifact.resolve(), carrier, vllm_router, prompts, (prefill, decode))


@main.command()
@click.argument("artifact", type=PATH)
@click.option("--only", multiple=True, metavar="ATTACK", help="One of them; may be repeated.  [default: all]")
@click.option("--turns", type=click.IntRange(1), default=4, show_default=True, help="Turns of each arm.")
@click.option("--seconds", default=5.0, show_default=True, help="Length of a turn.")
@click.option("--rate", default=10.0, show_default=True, help="Plain calls a second.")
def attack(artifact: Path, only: tuple[str, ...], turns: int, seconds: float, rate: float) -> None:
    """Measure plain calls while another client sends hostile ones."""
    from bench.attack import ATTACKS
    from bench.attack import main as run

    if unknown := set(only) - ATTACKS.keys():
        raise click.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(ATTACKS)}")
    run(artifact.resolve(), only or tuple(ATTACKS), turns, seconds, rate)


@main.command()
@click.option("--folder", type=click.Path(path_type=Path), help="[default: .cache/card]")
@click.option("--target", default="cuda", show_default=True, help="Target of the builds; cuda is tuned on the card.")
@click.option("--preset", default="full", show_default=True, help="Preset of the random checkpoints.")
@click.option("--layers", default="12,24", show_default=True)
@click.option(
    "--weights",
    default="bf16,int4,int8",
    show_default=True,
    help="Forms of weights; the first is measured at all depths first.",
)
@click.option("--paddings", default="16,512", show_default=True, help="Paddings of prefill.")
@click.option("--input-len", "prompt", default=6144, show_default=True, help="Tokens that the server is given.")
@click.option("--output-len", "answer", default=1024, show_default=True, help="Tokens that it answers.")
@click.option(
    "--minutes", default=25.0, show_default=True, help="No step starts after this time; the next call goes on."
)
@click.option("--transformers", type=PATH, help="A Python that has it.  [default: that of `make parity`, where it is]")
def card(folder: Path | None, layers: str, weights: str, transformers: Path | None, **settings: Any) -> None:
    """Test a card in its first minutes: doctor, builds, proofs, times and servers in each form of weights."""
    from bench.card import Card
    from bench.card import main as run
    from bench.inputs import CACHE
    from bench.peers import PARITY

    settings |= {"layers": tuple(numbers(layers)), "weights": tuple(weights.split(","))}
    run(Card((folder or CACHE.parent / "card").resolve(), transformers=transformers or PARITY, **settings))


@main.command()
def afd() -> None:
    """Compute for which sizes a split of attention and FFN would pay."""
    from bench.afd import main as run

    run()


@main.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--peers", type=PATH, help="Lines of JSON that `peers` printed.  [default: draw the memory of each form]")
def plot(output: Path, peers: Path | None) -> None:
    """Draw bars into OUTPUT, an SVG file: memory, or speed with --peers (extra `plot`)."""
    from bench.plot import memory, speed

    memory(output) if peers is None else speed(peers, output)


if __name__ == "__main__":
    main(prog_name="python -m bench")

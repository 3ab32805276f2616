"""The options of :class:`ling3export.plan.options.Options` as click's decorators."""

from collections.abc import Callable
from typing import Any

import click

from ling3export.plan.options import Options, parse_bytes, parse_paddings

DEFAULTS = Options()


class Paddings(click.ParamType):
    """``16,128,512``; what it means is checked with the plan."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """The integers between the commas."""
        if isinstance(value, tuple):
            return value
        return parse_paddings(value, *(() if param is None else param.opts[:1]))


class Bytes(click.ParamType):
    """``4GiB``."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes."""
        return value if isinstance(value, int) else parse_bytes(value, *(() if param is None else param.opts[:1]))


BUILD_OPTIONS = (
    click.option(
        "--paddings",
        type=Paddings(),
        default=DEFAULTS.paddings,
        help="Token slots of the prefill programs.  [default: 16,128,512]",
    ),
    click.option(
        "--decode-paddings",
        type=Paddings(),
        help="Sequences of the decode programs.  [default: 1, then paddings up to --max-running]",
    ),
    click.option(
        "--score-paddings",
        type=Paddings(),
        default=DEFAULTS.score_paddings,
        help="Token slots of programs that score given tokens.  [default: none]",
    ),
    click.option(
        "--tp",
        type=int,
        help="Devices that share the model.  [default: on cpu 16, or as many as the model splits over]",
    ),
    click.option(
        "--target",
        "targets",
        multiple=True,
        default=DEFAULTS.targets,
        help="PLATFORM[:KIND][:TOPOLOGY]; may be given many times.  [default: cpu]",
    ),
    click.option(
        "--max-running",
        type=int,
        default=DEFAULTS.max_running,
        show_default=True,
        help="Sequences that hold state at once.",
    ),
    click.option("--page-size", type=int, default=DEFAULTS.page_size, show_default=True, help="Tokens a latent page."),
    click.option("--context", type=int, help="Longest sequence.  [default: 8192, or the model's limit]"),
    click.option(
        "--memory-fraction",
        type=float,
        default=DEFAULTS.memory_fraction,
        show_default=True,
        help="Of an accelerator's memory, for weights and pools; the rest is for temporaries and programs.",
    ),
    click.option(
        "--state-memory",
        type=Bytes(),
        default=DEFAULTS.state_memory,
        help="For the state of all virtual devices of a cpu target.  [default: 4GiB]",
    ),
    click.option("--pages", type=int, help="Latent pages.  [default: what fits]"),
    click.option(
        "--dtype",
        type=click.Choice(["bfloat16", "float32"]),
        default=DEFAULTS.dtype,
        show_default=True,
        help="float32 means highest matmul precision throughout.",
    ),
)


def build_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :class:`ling3export.plan.options.Options`, ``jobs`` apart."""
    for option in reversed(BUILD_OPTIONS):
        command = option(command)
    return command


def given(context: click.Context) -> set[str]:
    """Names of the options that stand on the command line."""
    source = click.core.ParameterSource.COMMANDLINE
    return {name for name in context.params if context.get_parameter_source(name) is source}

"""The options of :class:`ling3export.plan.options.Options` as click's decorators."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ling3export.plan.options import Options, parse_bytes, parse_paddings
from ling3export.runners.cli.options import section

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


PROGRAMS = section(
    "Programs",
    click.option(
        "--paddings",
        type=Paddings(),
        default=DEFAULTS.paddings,
        help="Padded tokens of a prefill call.  [default: 16,128,512]",
    ),
    click.option(
        "--decode-paddings",
        type=Paddings(),
        help="Padded sequences of a decode step.  [default: 1, then --paddings up to --max-running]",
    ),
    click.option(
        "--score-paddings",
        type=Paddings(),
        default=DEFAULTS.score_paddings,
        help="Padded tokens of a call that scores given tokens.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["bfloat16", "float32"]),
        default=DEFAULTS.dtype,
        show_default=True,
        help="float32 means highest matmul precision throughout.",
    ),
)
MACHINES = section(
    "Machines",
    click.option(
        "--target",
        "targets",
        multiple=True,
        default=DEFAULTS.targets,
        metavar="TARGET",
        help="PLATFORM[:KIND][:TOPOLOGY]; may be given many times.  [default: cpu]",
    ),
    click.option("--tp", type=int, metavar="N", help="Devices that share the model on cpu.  [default: 16, or fewer]"),
)
POOLS = section(
    "Memory",
    click.option(
        "--max-running",
        type=int,
        metavar="N",
        default=DEFAULTS.max_running,
        show_default=True,
        help="Sequences that hold state at once.",
    ),
    click.option(
        "--context", type=int, metavar="N", help="Longest sequence in tokens.  [default: 8192, or the model's limit]"
    ),
    click.option(
        "--page-size",
        type=int,
        metavar="N",
        default=DEFAULTS.page_size,
        show_default=True,
        help="Tokens a latent page.",
    ),
    click.option("--pages", type=int, metavar="N", help="Latent pages.  [default: what fits]"),
    click.option(
        "--memory-fraction",
        type=float,
        metavar="SHARE",
        default=DEFAULTS.memory_fraction,
        show_default=True,
        help="Share of an accelerator's memory for weights and pools.",
    ),
    click.option(
        "--state-memory",
        type=Bytes(),
        default=DEFAULTS.state_memory,
        help="Memory for the state of all virtual cpu devices.  [default: 4GiB]",
    ),
)
IGNORE = click.option(
    "--ignore-config-field", "ignore", multiple=True, metavar="NAME", help="Ignore a field of config.json."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
WIDE = click.option("--wide", is_flag=True, help="Show all columns, where 80 characters do not hold them.")
PATH = click.Path(path_type=Path)


def build_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :class:`ling3export.plan.options.Options`, ``jobs`` apart."""
    built: Callable[..., None] = PROGRAMS(MACHINES(POOLS(command)))
    return built


def given(context: click.Context) -> set[str]:
    """Names of the options that stand on the command line."""
    source = click.core.ParameterSource.COMMANDLINE
    return {name for name in context.params if context.get_parameter_source(name) is source}

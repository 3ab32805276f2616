"""The options of :class:`ling3export.plan.options.Options` as click's decorators."""

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from ling3export.artifacts.parameters import WEIGHTS
from ling3export.plan.options import AS_STORED, Options, parse_bytes, parse_paddings
from ling3export.runners.cli.command import section
from ling3export.runners.cli.options import field_option

_option = partial(field_option, Options)


class Parsed(click.ParamType):
    """The value that a function reads from the text of an option.

    Args:
        name: For the text in help: ``N,N,...``.
        parse: Called with the text and, for messages, the option's name; raises a PlanError.
    """

    def __init__(self, name: str, parse: Callable[..., Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value; a default is one already."""
        return self._parse(value, *([] if param is None else param.opts[:1])) if isinstance(value, str) else value


PADDINGS, BYTES = Parsed("N,N,...", parse_paddings), Parsed("SIZE", parse_bytes)


PROGRAMS = section(
    "Programs",
    _option("paddings", PADDINGS, "Padded tokens of a prefill call.  [default: 16,128,512]"),
    _option(
        "decode_paddings",
        PADDINGS,
        "Padded sequences of a decode step.  [default: 1, then --paddings up to --max-running]",
    ),
    _option("score_paddings", PADDINGS, "Padded tokens of a call that scores given tokens."),
    _option("afd", None, "Also add decode programs whose experts an ffn-worker computes (experimental).", is_flag=True),
    _option(
        "afd_dtype",
        click.Choice(["model", "int8"]),
        "With --afd: send tokens to the ffn-worker in the model's dtype, or in int8, half the bytes.",
    ),
    _option("kernels", click.Choice(["auto", "on", "off"]), "Native kernels in executables for cpu."),
    _option(
        "weights",
        click.Choice([AS_STORED, *WEIGHTS]),
        "Store matrices in 8 bits; int4: routed experts in 4, all else in 8; int4-small: all in 4, tables in 6; "
        "int4-experts leaves all else as it is. "
        "int8-channel, with a scale an output, is for tpu.",
    ),
    _option("dtype", click.Choice(["bfloat16", "float32"]), "float32 means highest matmul precision throughout."),
)
MACHINES = section(
    "Machines",
    _option(
        "targets",
        str,
        "Machine to build for, such as cpu@2, tpu:v6e:4x4 or cuda; may be given many times.  [default: cpu]",
        flag="--target",
        multiple=True,
        metavar="TARGET",
    ),
    _option(
        "tp", int, "Devices that share the model on cpu.  [default: 1; 16 or fewer without CHECKPOINT]", metavar="N"
    ),
)
POOLS = section(
    "Memory",
    _option(
        "max_running",
        int,
        "Sequences that hold state at once.  [default: what memory takes on cpu, or 64]",
        metavar="N",
    ),
    _option("context", int, "Longest sequence in tokens.  [default: what memory takes on cpu, or 8192]", metavar="N"),
    _option("page_size", int, "Tokens a latent page.", metavar="N"),
    _option("pages", int, "Latent pages.  [default: what fits]", metavar="N"),
    _option(
        "snapshots",
        int,
        "Copies of states that a prefix cache can keep.  [default: what memory takes on cpu, or 0]",
        metavar="N",
    ),
    _option("memory_fraction", float, "Share of an accelerator's memory for weights and pools.", metavar="SHARE"),
    _option("state_memory", BYTES, "Memory for the state of all virtual cpu devices.  [default: 4GiB]"),
)
IGNORE = click.option(
    "--ignore-config-field", "ignore", multiple=True, metavar="NAME", help="Ignore a field of config.json."
)
ROUNDING = click.option(
    "--allow-rounding", is_flag=True, help="Round weights that --dtype does not hold, such as INT4's in bfloat16."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
WIDE = click.option("--wide", is_flag=True, help="Show all columns, where 80 characters do not hold them.")


def build_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :class:`ling3export.plan.options.Options`, ``jobs`` apart."""
    built: Callable[..., None] = PROGRAMS(MACHINES(POOLS(command)))
    return built

"""The options of :class:`ling3export.plan.options.Options` as click's decorators."""

from collections.abc import Callable
from typing import Any

import click

from ling3export.plan.options import Options, parse_bytes, parse_paddings
from ling3export.runners.cli.options import Decorator, section

DEFAULTS = Options()


class Parsed(click.ParamType):
    """The value that a function reads from the text of an option.

    Args:
        name: What help calls the text: ``N,N,...``.
        parse: Called with the text and, for messages, the option's name; raises a PlanError.
    """

    def __init__(self, name: str, parse: Callable[..., Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value; a default is one already."""
        return self._parse(value, *([] if param is None else param.opts[:1])) if isinstance(value, str) else value


PADDINGS, BYTES = Parsed("N,N,...", parse_paddings), Parsed("SIZE", parse_bytes)


def _option(name: str, kind: Any, help: str, field: str | None = None, **settings: Any) -> Decorator:
    """An option with the default of a field of Options, which has its name unless ``field`` says another."""
    field = field or name.removeprefix("--").replace("-", "_")
    shown = "[default: " not in help
    default = getattr(DEFAULTS, field)
    return click.option(name, field, type=kind, default=default, show_default=shown, help=help, **settings)


PROGRAMS = section(
    "Programs",
    _option("--paddings", PADDINGS, "Padded tokens of a prefill call.  [default: 16,128,512]"),
    _option(
        "--decode-paddings",
        PADDINGS,
        "Padded sequences of a decode step.  [default: 1, then --paddings up to --max-running]",
    ),
    _option("--score-paddings", PADDINGS, "Padded tokens of a call that scores given tokens."),
    _option("--segments", click.Choice(["none", "group"]), "Also cut prefill into a call for each group of layers."),
    _option("--afd", int, "Also cut decode at the experts, for N processes.  [default: 0]", metavar="N"),
    _option("--afd-dtype", click.Choice(["model", "int8"]), "What travels to the experts; int8 with a scale a token."),
    _option("--kernels", click.Choice(["auto", "on", "off"]), "Native kernels in executables for cpu."),
    _option("--dtype", click.Choice(["bfloat16", "float32"]), "float32 means highest matmul precision throughout."),
)
MACHINES = section(
    "Machines",
    _option(
        "--target",
        str,
        "PLATFORM[:KIND][:TOPOLOGY]; may be given many times.  [default: cpu]",
        "targets",
        multiple=True,
        metavar="TARGET",
    ),
    _option("--tp", int, "Devices that share the model on cpu.  [default: 16, or fewer]", metavar="N"),
)
POOLS = section(
    "Memory",
    _option("--max-running", int, "Sequences that hold state at once.", metavar="N"),
    _option("--context", int, "Longest sequence in tokens.  [default: 8192, or the model's limit]", metavar="N"),
    _option("--page-size", int, "Tokens a latent page.", metavar="N"),
    _option("--pages", int, "Latent pages.  [default: what fits]", metavar="N"),
    _option("--snapshots", int, "Copies of states that a prefix cache can keep.", metavar="N"),
    _option("--memory-fraction", float, "Share of an accelerator's memory for weights and pools.", metavar="SHARE"),
    _option("--state-memory", BYTES, "Memory for the state of all virtual cpu devices.  [default: 4GiB]"),
)
IGNORE = click.option(
    "--ignore-config-field", "ignore", multiple=True, metavar="NAME", help="Ignore a field of config.json."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
WIDE = click.option("--wide", is_flag=True, help="Show all columns, where 80 characters do not hold them.")


def build_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of :class:`ling3export.plan.options.Options`, ``jobs`` apart."""
    built: Callable[..., None] = PROGRAMS(MACHINES(POOLS(command)))
    return built


def given(context: click.Context) -> set[str]:
    """Names of the options that stand on the command line."""
    source = click.core.ParameterSource.COMMANDLINE
    return {name for name in context.params if context.get_parameter_source(name) is source}

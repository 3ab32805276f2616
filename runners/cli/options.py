"""Groups, commands and options as click draws them: nothing given is lost, help in sections, errors printed by name.

The sampling options have the bounds, defaults and words that Python and HTTP have.
"""

import atexit
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import click

from ling3export.artifacts.files import TRUST
from ling3export.foundation.shards import WHOLE, Shard
from ling3export.machine.verdict import CHECKS, POLICIES
from ling3export.runners.cli.errors import guarded, require
from ling3export.runners.engine.request import BOUNDS, Sampling
from ling3export.runners.load.references import REFERENCE
from ling3export.runners.transfer.options import PrefixFolder

INTERRUPTED = 130  # the exit code that shells give after SIGINT
PATH = click.Path(path_type=Path)
Decorator = Callable[[Any], Any]


class _Folder(click.Path):
    """A folder that is to be written, which no version in a store is."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or a usage error."""
        if isinstance(value, str) and REFERENCE.match(value) and not Path(value).parent.is_dir():
            self.fail(f"expected a folder to write, found the reference {value}; pull it, and publish another.")
        return super().convert(value, param, ctx)


FOLDER = _Folder()


@runtime_checkable
class Later(Protocol):
    """The value of a parameter that the others decide, too."""

    def decided(self, context: click.Context) -> Any:
        """The value, once ``context`` has those of the others."""
        ...


class Once(click.Option):
    """An option that may not be given twice: where click takes the last value, a user may have meant both."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"multiple": True}))

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """The one value, or None.

        Raises:
            click.UsageError: The option was given more than once.
        """
        values = super().process_value(ctx, value) or ()
        if len(values) > 1:
            raise click.UsageError(f"{self.opts[0]}: expected it once, found it {len(values)} times.", ctx)
        return values[0] if values else None


class Command(click.Command):
    """A command whose help shows its options in the sections that ``section`` gave them."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, once every parameter has its value."""
        for name, value in ctx.params.items():
            if isinstance(value, Later):
                ctx.params[name] = value.decided(ctx)
            elif isinstance(value, tuple):
                ctx.params[name] = tuple(each.decided(ctx) if isinstance(each, Later) else each for each in value)
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list of options for each section, and the other options last."""
        rows: dict[str, list[tuple[str, str]]] = {}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for option in sorted(options, key=lambda option: not hasattr(option, "section")):
            if (row := option.get_help_record(ctx)) is not None:
                rows.setdefault(getattr(option, "section", "Options"), []).append(row)
        for title, found in rows.items():
            with formatter.section(title):
                formatter.write_dl(found)


class Group(click.Group):
    """A group whose help shows its commands in sections. Errors are printed; an interrupted command ends with 130.

    Args:
        sections: The names of the commands by the section's title; all commands in one section by default.
    """

    command_class = Command

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])
        self._sections = sections or {}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes a list of commands for each section."""
        if not self._sections:
            return super().format_commands(ctx, formatter)
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the command line as all that this process does."""
        atexit.register(gc.freeze)  # it ends then: looking for cycles in all of jax's objects takes as long as a step
        return super().__call__(*args, **kwargs)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the command line. Errors of parsing are printed like those of commands."""
        return guarded(super().main)(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; when an interruption arrives here, the command has tidied up what it has to."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)


def section(title: str, *options: Decorator) -> Decorator:
    """Gives a command options, and shows them under a title of their own in its help."""

    def add(command: Any) -> Any:
        before = list(getattr(command, "__click_params__", ()))
        for option in reversed(options):
            command = option(command)
        for param in command.__click_params__:
            if param not in before:
                param.section = title
        return command

    return add


class Setting(click.ParamType):
    """A number within the bounds of a sampling setting.

    Args:
        name: A field of Sampling.
    """

    def __init__(self, name: str) -> None:
        self._bounds = BOUNDS[name]
        self._type = click.INT if self._bounds.whole else click.FLOAT
        self.name = self._type.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error."""
        number: float = self._type.convert(value, param, ctx)
        if not self._bounds.hold(number):
            self.fail(f"expected {self._bounds}, found {number}.", param, ctx)
        return number


class Switch(click.Choice[str]):
    """``on`` or ``off`` as True or False."""

    def __init__(self) -> None:
        super().__init__(("on", "off"))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The truth value, or a usage error."""
        return value if isinstance(value, bool) else super().convert(value, param, ctx) == "on"


def sampling_option(name: str, text: str) -> Decorator:
    """``--temperature`` and its like: an option for the field ``name`` of Sampling, with the help ``text``."""
    default = getattr(Sampling, name)
    return click.option(f"--{name.replace('_', '-')}", type=Setting(name), default=default, help=text)


class _Share(click.ParamType):
    """The share of a work, as :meth:`ling3export.foundation.shards.Shard.parse` reads it."""

    name = "I/N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Shard:
        """The share."""
        return value if isinstance(value, Shard) else Shard.parse(value)


def shard_option(what: str, does: str = "") -> Decorator:
    """``--shard``: every N-th ``what``; ``does`` says what else the command then does otherwise."""
    text = f"{does} Every N-th {what} from {what} I on; auto in a Slurm array, auto/N in an indexed job.".lstrip()
    return click.option("--shard", type=_Share(), default=WHOLE, metavar="I/N", help=text)


cluster_options = section(
    "Cluster",
    click.option("--on", metavar="ray[://HOST:PORT]", help="Work on a Ray cluster, of which this machine is a node."),
    click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Workers there."),
    click.option(
        "--resources",
        default='{"CPU": 1}',
        show_default=True,
        metavar="JSON",
        help='What each of them needs, such as {"TPU": 4}.',
    ),
)
temperature_option = sampling_option("temperature", "0 takes the most likely token; at most 2.")
target_option = click.option(
    "--target", cls=Once, help="One of the artifact's targets.  [default: the only one that fits]"
)
programs_option = click.option(
    "--programs",
    type=click.Choice(POLICIES),
    default="prebuilt-only",
    help="Whether programs that do not fit this machine may be compiled here.",
)
check_option = click.option(
    "--check",
    type=click.Choice(CHECKS),
    default="all",
    help="Which digests to check: programs leaves out the weights; copy uses a copy of them in memory, and checks it.",
)
step_timeout_option = click.option(
    "--step-timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Fail what runs once a call of the devices takes longer.  [default: any time]",
)


def _trusted(context: click.Context, param: click.Parameter, folder: str | None) -> None:
    """Tells this process and those that it starts where the keys are; whoever reads a manifest looks there."""
    if folder == "":
        raise click.BadParameter("expected a folder of public keys, found an empty value.")
    if folder is not None:
        os.environ[TRUST] = folder
    if os.environ.get(TRUST):
        require("--trust", "sign", "cryptography")


trust_option = click.option(
    "--trust",
    metavar="KEYS",
    expose_value=False,
    is_eager=True,  # before an artifact is pulled
    callback=_trusted,
    help=f"Take only what a public key of this folder has signed.  [default: ${TRUST}]",
)
stop_option = click.option("--stop", multiple=True, metavar="TEXT", help="End the text before this; may be repeated.")


def prefix_cache_option(shown: str, **settings: Any) -> Decorator:
    """``--prefix-cache``, with words for its default."""
    text = f"Compute prompts that begin alike once.  [default: {shown}]"
    return click.option("--prefix-cache", type=Switch(), help=text, show_default=False, **settings)


prefix_options = section(
    "Prefix cache",
    prefix_cache_option("on where the artifact has snapshots"),
    click.option(
        "--evict",
        type=click.Choice(["lru", "flops"]),
        default="lru",
        help="What it gives up first: what was not used for longest, or what saves least work.",
    ),
    click.option(
        "--prefix-store",
        type=PATH,
        metavar="FOLDER",
        help="Keep what it knows in this folder, for later and for others.  [default: it ends with the process]",
    ),
    click.option(
        "--prefix-store-bytes",
        type=click.IntRange(1),
        default=PrefixFolder.limit,
        help="What the folder may have; what was not used for longest goes.",
    ),
)
artifact_options = section("Artifact", target_option, programs_option, check_option, trust_option, step_timeout_option)

"""The options that commands share: those of a configuration's fields, of sampling, of a work's share.

The sampling options have the bounds, defaults and words that Python and HTTP have.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click

from ling3export.foundation.errors import RequestError
from ling3export.foundation.shards import WHOLE, Shard
from ling3export.machine.verdict import CHECKS, POLICIES
from ling3export.runners.cli.command import Decorator, section
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.request import Sampling
from ling3export.runners.engine.validation import BOUNDS, NumberRange
from ling3export.runners.hosts.hosts import read_secret
from ling3export.runners.load.references import is_reference
from ling3export.runners.transfer.options import CARRIERS, ROLES, PrefixFolder, Transfer

PATH = click.Path(path_type=Path)
SECONDS = click.FloatRange(0, min_open=True)
POSITIVE = click.IntRange(1)
PORT = click.IntRange(0, 65535)


class _Folder(click.Path):
    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or a usage error."""
        if isinstance(value, str) and is_reference(value):
            self.fail(f"expected a folder to write, found the reference {value}; pull it, and publish another.")
        return super().convert(value, param, ctx)


FOLDER = _Folder()


def within(bounds: NumberRange) -> click.ParamType:
    """A number within the bounds of a setting."""
    if bounds.whole:
        return click.IntRange(int(bounds.low), int(bounds.high))
    return click.FloatRange(bounds.low, bounds.high, min_open=bounds.above)


def switch(value: str | bool) -> bool:
    """``on`` or ``off`` as True or False. Raises click.BadParameter: it is neither."""
    if value in ("on", "off"):
        return value == "on"
    if not isinstance(value, bool):
        raise click.BadParameter(f"expected on or off, found {value!r}.")
    return value


def field_option(
    config: type, name: str, kind: Any, text: str, default: Any = ..., flag: str = "", **settings: Any
) -> Decorator:
    """An option that gives a field of a configuration.

    Args:
        config: A dataclass, whose default the option has.
        text: Its help. Where that ends with "  [default: …]", that is shown in the place of the default.
        default: A default for one command, in the place of the field's.
        flag: The option's name where it is not the field's.
    """
    if default is not ...:
        text = text.partition("  [default: ")[0]
    else:
        default = getattr(config, name)
    shown = "[default: " not in text
    flag = flag or f"--{name.replace('_', '-')}"
    return click.option(flag, name, type=kind, default=default, show_default=shown, help=text, **settings)


class _Flag(NamedTuple):
    """The option of a field of EngineConfig, which has the field's name and default; see ``field_option``."""

    kind: Any
    text: str
    settings: Mapping[str, Any] = MappingProxyType({})


# The options of EngineConfig, by field.
ENGINE = {
    "target": _Flag(None, "One of the artifact's targets.  [default: the only one that fits]"),
    "programs": _Flag(click.Choice(POLICIES), "Whether programs that do not fit this machine may be compiled here."),
    "check": _Flag(
        click.Choice(CHECKS),
        "Which digests to check: programs leaves out the weights; copy uses a copy of them in memory, and checks it.",
    ),
    "step_timeout": _Flag(
        SECONDS, "Fail what runs once a call of the devices takes longer.  [default: any time]", {"metavar": "SECONDS"}
    ),
    "max_requests": _Flag(POSITIVE, "Prompts at once, waiting ones too; more get 429."),
    "prefix_cache": _Flag(
        switch,
        "Compute prompts that begin alike once.  [default: on where the artifact has snapshots]",
        {"metavar": "[on|off]"},
    ),
    "ffn": _Flag(None, "Send the experts of decode steps to this ffn-worker (experimental).", {"metavar": "NAME"}),
}
# The folder of PrefixFolder, which is EngineConfig.prefix_store.
PREFIX_STORE = click.option(
    "--prefix-store",
    type=PATH,
    metavar="FOLDER",
    help="Keep what the prefix cache knows in this folder, for later and for other processes.  [default: it ends "
    "with the process]",
)
# The options of Transfer by its fields, which are those of EngineConfig.transfer.
TRANSFER = {
    "carrier": click.option(
        "--transfer",
        "transfer_carrier",
        type=click.Choice(CARRIERS),
        help="How states go from servers that prefill to servers that decode.  [default: none does]",
    ),
    "role": click.option(
        "--role",
        "transfer_role",
        type=click.Choice(ROLES),
        default=Transfer.role,
        help="With --transfer: prefill gives states, decode takes them, both does both.",
    ),
    "host": click.option(
        "--transfer-host",
        default=Transfer.host,
        help="With --transfer http: address at which other servers reach this one.",
    ),
    "peers": click.option(
        "--transfer-peer",
        "transfer_peers",
        multiple=True,
        metavar="HOST:PORT",
        help="With --transfer http: a server from which this one may take states; again for more.  [default: all of "
        "this machine]",
    ),
    "folder": click.option(
        "--transfer-folder", type=PATH, help="With --transfer file: the folder that all servers see."
    ),
    "limit": click.option(
        "--shm-bytes",
        "transfer_limit",
        type=POSITIVE,
        default=Transfer.limit,
        help="With --transfer: bytes of memory for states that wait to be fetched. While it is full, no further state "
        "is kept, and the other server computes the prompt again.",
    ),
}
# Fields of EngineConfig that have no option: a command sets them, or Python does.
PYTHON_ONLY = ("overlap", "linger", "ffn_timeout")
SECTIONS = {
    "Limits": ("max_requests",),
    "Artifact": ("target", "programs", "check", "step_timeout"),
    "Prefix cache": ("prefix_cache", "prefix_store"),
    "Prefill and decode apart": ("transfer",),
    "Attention and FFN apart": ("ffn",),
}


def engine_option(name: str, default: Any = ...) -> Decorator:
    """The option of a field of EngineConfig, with a default of this command's own where one is given."""
    kind, text, settings = ENGINE[name]
    return field_option(EngineConfig, name, kind, text, default, **settings)


def engine_options(*names: str, **defaults: Any) -> Decorator:
    """Gives a command the options of these fields of EngineConfig; it gets the configuration as ``engine``."""
    parts: dict[str, Sequence[Decorator]] = {"prefix_store": [PREFIX_STORE], "transfer": [*TRANSFER.values()]}

    def add(command: Callable[..., Any]) -> Any:
        @wraps(command)
        def configured(**options: Any) -> Any:
            made = {"prefix_store": _prefix_folder_of, "transfer": _transfer_of}
            settings: dict[str, Any] = {
                name: made[name](options) if name in made else options.pop(name) for name in names
            }
            return command(engine=EngineConfig(**settings), **options)

        result: Any = configured
        for title, group in reversed(SECTIONS.items()):
            options: list[Decorator] = []
            for name in group:
                if name in names:
                    options += parts.get(name) or [engine_option(name, defaults.get(name, ...))]
            result = section(title, *options)(result) if options else result
        return result

    return add


def _prefix_folder_of(options: dict[str, Any]) -> PrefixFolder | None:
    folder = options.pop("prefix_store")
    return None if folder is None else PrefixFolder(folder)


def _transfer_of(options: dict[str, Any]) -> Transfer | None:
    """The ``Transfer`` of its options; None without ``--transfer``.

    Raises:
        RequestError: A role without a carrier.
        Ling3Error: The carrier lacks its folder; the secret cannot be read.
    """
    settings = {name: options.pop(f"transfer_{name}") for name in TRANSFER}
    if settings["carrier"] is None:
        if settings["role"] != Transfer.role:
            raise RequestError(f"--role {settings['role']}: needs --transfer")
        return None
    return Transfer(**settings, secret=read_secret() if settings["carrier"] == "http" else "")


def sampling_option(name: str, text: str) -> Decorator:
    """``--temperature`` and its like: an option for the field ``name`` of Sampling, with the help ``text``."""
    return field_option(Sampling, name, within(BOUNDS[name]), text)


def shard_option(text: str) -> Decorator:
    """``--shard``; ``text`` says which share it is."""
    text = f"{text}; auto in a Slurm array, auto/N in an indexed job."
    return click.option("--shard", type=Shard.parse, default=str(WHOLE), metavar="I/N", help=text)


# The options of Sampling by its fields.
SAMPLING = {
    "temperature": "0 takes the most likely token; at most 2.",
    "top_k": "Sample among this many of the most likely tokens; 0 for all.",
    "top_p": "Sample among the fewest tokens that hold this probability.",
    "min_p": "Sample among tokens at least so many times as likely as the best.",
    "seed": "Seed of the sampling.",
    "presence_penalty": "Subtract this from the logit of a token that was generated before.",
    "frequency_penalty": "Subtract this from it as often as it was generated before.",
    "repetition_penalty": "Divide the logit of a token of the prompt or the answer by this; 1 changes nothing.",
}
temperature_option = sampling_option("temperature", SAMPLING["temperature"])
stop_option = click.option("--stop", multiple=True, metavar="TEXT", help="End the text before this; may be repeated.")


def sampling_options(*names: str, **texts: str) -> Sequence[Decorator]:
    """The options of these fields of Sampling, by default of all; ``texts`` replaces the help of some."""
    return [sampling_option(name, texts.get(name, SAMPLING[name])) for name in names or SAMPLING]


target_option = engine_option("target")

"""The settings of an engine: stated once, checked once, and handed unchanged to every part of it, on every host."""

import threading
from dataclasses import dataclass
from typing import Any

from ling3export.foundation.errors import RequestError
from ling3export.machine.verdict import CHECKS, POLICIES
from ling3export.runners.engine.validation import NumberRange
from ling3export.runners.ffn import FFN_ALONE, WAIT
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.transfer.options import PrefixFolder, Transfer

CHOICES = {"programs": POLICIES, "check": CHECKS}
NUMBERS = {
    "max_requests": NumberRange(0, (1 << 31) - 1, whole=True),
    "step_timeout": NumberRange(0, threading.TIMEOUT_MAX, above=True),
    "ffn_timeout": NumberRange(0, threading.TIMEOUT_MAX, above=True),
    "linger": NumberRange(0, threading.TIMEOUT_MAX),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs an artifact. All hosts of one engine are given the same.

    Raises:
        RequestError: A value is none that its field takes, or two of them exclude each other.
    """

    target: str | None = None
    """Name of the target that runs; None takes the only one that fits this machine."""

    programs: str = "prebuilt-only"
    """``prebuilt-only``, or ``allow-compile``: portable programs are compiled here where executables do not fit."""

    check: str = "all"
    """Digests that are checked: ``all``; ``programs``, all but those of weights; ``copy``, all, on a copy in memory."""

    overlap: bool = True
    """Whether the next step is dispatched before the tokens of the last one are read. The tokens are the same."""

    max_requests: int | None = None
    """Most requests at once, waiting ones too; more are refused with QueueFull. None takes any number."""

    step_timeout: float | None = None
    """Seconds after which a call of the devices that did not return stops the engine; None for any time."""

    linger: float = 0.0
    """Seconds that this process refuses everything with HostGone once another host is gone, before it ends."""

    prefix_cache: bool | None = None
    """Whether prompts that begin alike are computed once; None where the artifact has snapshots."""

    prefix_store: PrefixFolder | None = None
    """The folder in which the prefix cache keeps what it knows for later; None where that ends with the engine."""

    ffn: str | None = None
    """Name of the FFN worker that computes the experts of decode steps; None where this process does."""

    ffn_timeout: float = WAIT
    """Seconds to wait for an FFN worker to be there, and for each of its answers."""

    transfer: Transfer | None = None
    """How states leave for other engines and come from them; None where none does."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise RequestError(f"{name}: expected one of {', '.join(choices)}, found {str(value)[:100]}")
        for name, bounds in NUMBERS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, bounds.number(value, name))
        for option, setting in (("--transfer", self.transfer), ("--prefix-store", self.prefix_store)):
            if setting is not None and self.ffn:
                raise RequestError(f"{option}: expected an engine that computes its own experts, found an FFN worker")

    def check_hosts(self, hosts: Hosts | None) -> None:
        """Refuses settings that an engine on several hosts cannot have.

        Raises:
            RequestError: There are several hosts, and FFN workers or a prefix store.
        """
        if hosts is not None and self.ffn:
            raise RequestError(*FFN_ALONE)
        if hosts is not None and self.prefix_store is not None:
            raise RequestError("--prefix-store: it does not work on several hosts", "leave it out")

    def check_transfer(self, name: str, *, gives: bool) -> None:
        """Refuses a request whose state would have to leave this engine, or to come to it, where states do not.

        Args:
            gives: Whether the state leaves; else it comes.

        Raises:
            RequestError: There is no transfer, or its role is the other one.
        """
        transfer = self.transfer
        if transfer is None or not (transfer.gives if gives else transfer.takes):
            needed, actual = "prefill" if gives else "decode", "none" if transfer is None else f"--role {transfer.role}"
            raise RequestError(
                f"{name}: expected an engine with --transfer and --role {needed} or both for these "
                f"kv_transfer_params, found {actual}"
            )

    @property
    def agreed(self) -> dict[str, Any]:
        """The settings that decide which calls come in which order, by name: they must be the same on all hosts."""
        return {"overlap": self.overlap, "prefix_cache": self.prefix_cache}

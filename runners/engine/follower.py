"""Hosts other than host 0: each takes the steps that host 0 takes, and prints nothing."""

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ling3export.foundation.errors import Ling3Error, RankDivergence
from ling3export.runners.engine.assembly import load_parts
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.hosts.channel import END, Channel, end_process
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.load.loader import say


def check_digests(digests: Sequence[bytes]) -> None:
    """Compares the digests of all hosts, by number: RankDivergence if they differ; none or one is always right."""
    others = [number for number, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise RankDivergence(
            f"sampled tokens: expected the same on {len(digests)} processes, found others than on process 0 on "
            f"{', '.join(map(str, others))}"
        )


def follow(
    artifact: str | Path,
    hosts: Hosts,
    config: EngineConfig | None = None,
    *,
    grace: float | None = None,
    report: Callable[[str], None] = say,
    **settings: Any,
) -> None:
    """Loads the artifact on a host other than 0, and takes the steps that host 0 takes until host 0 ends.

    Args:
        grace: Seconds, in addition to ``host_timeout``, in which host 0 may end after SIGTERM or SIGINT, which it gets
            as well. Only in the main thread. By default the signals end this process.

    Raises:
        ArtifactError, HostsError: The artifact cannot be loaded here, or not with the other hosts (``load``).
        RankDivergence: This host read other tokens than host 0. Or all compared theirs and some differed: then it is
            raised once host 0 has ended.
    """
    parts = load_parts(artifact, replace(config or EngineConfig(), **settings), hosts, report)
    from ling3export.runners.engine.core import SharedCore

    channel, core = parts.loaded.channel, parts.core
    assert channel is not None and isinstance(core, SharedCore)
    if grace is not None:
        _outlive_signals(channel, grace)
    report(f"host {hosts.number}: {parts.loaded.weight_bytes:,} bytes of weights; following host 0")
    diverged: RankDivergence | None = None
    with channel.together():
        channel.parts(b"")  # host 0 waits for all of these
        while (message := channel.take())[0] != END:
            digests = core.received(message[1]).digests
            try:
                check_digests(digests)
            except RankDivergence as error:
                diverged = error
        core.cancel_all()
    if diverged is not None:
        raise diverged


def _outlive_signals(channel: Channel, grace: float) -> None:
    """Lets the first SIGTERM or SIGINT only set the time by which host 0 must have ended."""
    most = grace + channel.hosts.host_timeout

    def late() -> None:
        text = f"host {channel.hosts.number}: expected host 0 to end within {most:g} s of a signal, found it running"
        channel.fail(text)
        end_process(text, Ling3Error.exit_code)

    def signalled(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        timer = threading.Timer(most, late)
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signalled)

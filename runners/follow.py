"""Host 0 sends the commands of each turn before it takes them; the other hosts take what they receive, in silence.

A turn follows from its commands and the tokens read (``turns.py``), and every host reads the same tokens. So commands
are all that travels.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ling3export.runners.channel import END, TURN, Channel
from ling3export.runners.hosts import Hosts
from ling3export.runners.loader import load, say
from ling3export.runners.request import Request, Sampling
from ling3export.runners.scheduler import Scheduler
from ling3export.runners.sequence import Sequence
from ling3export.runners.turns import Arrival, Commands, Turn, Turns


def encode(commands: Commands) -> bytes:
    """Commands as they travel: JSON, nothing for none. When a request arrived is host 0's affair."""
    if not commands.arrivals and not commands.cancelled:
        return b""
    arrivals = [[arrival.number, asdict(arrival.request)] for arrival in commands.arrivals]
    return json.dumps({"arrivals": arrivals, "cancelled": commands.cancelled}).encode()


def decode(payload: bytes) -> Commands:
    """What ``encode`` wrote."""
    if not payload:
        return Commands()
    said = json.loads(payload)
    return Commands(
        tuple(Arrival(number, _request(fields)) for number, fields in said["arrivals"]), tuple(said["cancelled"])
    )


def _request(fields: dict[str, object]) -> Request:
    sampling = Sampling(**fields.pop("sampling"))  # type: ignore[arg-type]
    ids, stop = fields.pop("prompt_ids"), fields.pop("stop")
    return Request(tuple(ids), sampling=sampling, stop=tuple(stop), **fields)  # type: ignore[arg-type]


class LeadingTurns(Turns):
    """Turns of host 0: the other hosts take the same ones.

    Args:
        scheduler: Runs the sequences.
        sequence: Makes one of an arrival.
        channel: To the other hosts.
    """

    def __init__(self, scheduler: Scheduler, sequence: Callable[[Arrival], Sequence], channel: Channel) -> None:
        super().__init__(scheduler, sequence)
        self._channel = channel

    def turn(self, commands: Commands) -> Turn:
        """Sends the commands, and takes them."""
        self._channel.send(TURN, encode(commands))
        try:
            return super().turn(commands)
        except BaseException as error:
            self._channel.settle()  # if a host is gone, the watch ends this process with a better message
            self._channel.fail(f"a step failed: {error}")
            raise

    def cancel_all(self) -> None:
        """Ends everything on all hosts."""
        self._channel.send(END)
        super().cancel_all()
        self._channel.finish()


def follow(
    artifact: str | Path, hosts: Hosts, *, target: str | None = None, programs: str = "prebuilt-only",
    check: str = "all", overlap: bool = True, report: Callable[[str], None] = say,
) -> None:  # fmt: skip
    """What every host but the first does: takes the same steps until host 0 ends.

    Args:
        artifact: Its folder, with the same content on every host.
        hosts: This process's place.
        target: As on host 0, like all that follows.
        programs: ``prebuilt-only``, or ``allow-compile``.
        check: ``all``, or ``programs``.
        overlap: Dispatch the next step before the tokens of the last one are read.
        report: Told what was chosen and why.

    Raises:
        ArtifactError, HostsError: As ``load``.
    """
    loaded = load(artifact, target=target, programs=programs, check=check, report=report, hosts=hosts)
    from ling3export.runners.driving import driving

    channel, turns = loaded.channel, driving(loaded, overlap=overlap).turns
    assert channel is not None
    report(f"host {hosts.number}: {loaded.weight_bytes:,} bytes of weights; following host 0")
    try:
        while True:
            kind, payload = channel.take()
            if kind == END:
                break
            turns.turn(decode(payload))
        turns.cancel_all()
    except BaseException as error:
        channel.settle()
        channel.fail(f"a step failed: {error}")
        raise
    channel.finish()

"""Host 0 sends the commands of each turn before it takes them; the other hosts take what they receive, in silence.

A turn follows from its commands and the tokens read (``turns.py``), and every host reads the same tokens. So commands
are all that travels, and with each turn a digest of the tokens that host 0 read before it: whoever read others says so
and ends, before it would make other calls, which none of the hosts would ever come back from.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ling3export.errors import RankDivergence
from ling3export.runners.engine.engine_step import Arrival, Commands, Turn, Turns
from ling3export.runners.engine.request import Request, Sampling
from ling3export.runners.engine.scheduler import Scheduler
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.evals.ranks import HINT, check_digests
from ling3export.runners.hosts.channel import DIVERGED, END, TURN, Channel
from ling3export.runners.hosts.hosts import Hosts, agreed
from ling3export.runners.load.loader import load, say

SHORT = 8  # bytes of a digest that travel with every turn


def encode(commands: Commands) -> bytes:
    """Commands as they travel: JSON, nothing for none. When a request arrived is host 0's affair."""
    if commands == Commands():
        return b""
    arrivals = [[arrival.number, asdict(arrival.request)] for arrival in commands.arrivals]
    return json.dumps({**commands._asdict(), "arrivals": arrivals}).encode()


def decode(payload: bytes) -> Commands:
    """What ``encode`` wrote."""
    if not payload:
        return Commands()
    said = json.loads(payload)
    return Commands(
        tuple(Arrival(number, _request(fields)) for number, fields in said["arrivals"]), tuple(said["cancelled"]),
        said["compare"],
    )  # fmt: skip


def _request(fields: dict[str, object]) -> Request:
    sampling = Sampling(**fields.pop("sampling"))  # type: ignore[arg-type]
    ids, stop = fields.pop("prompt_ids"), fields.pop("stop")
    return Request(tuple(ids), sampling=sampling, stop=tuple(stop), **fields)  # type: ignore[arg-type]


class SharedTurns(Turns):
    """Turns that all hosts take alike: host 0 sends the commands of each to the others.

    Every host hashes the tokens that it reads, in the order of reading, as little-endian int32. All compare these
    digests where the commands ask for it, and the others with host 0's before each turn.

    Args:
        scheduler: Runs the sequences.
        sequence: Makes one of an arrival.
        channel: Between the hosts.
    """

    def __init__(self, scheduler: Scheduler, sequence: Callable[[Arrival], Sequence], channel: Channel) -> None:
        super().__init__(scheduler, sequence)
        self._channel = channel
        self._read = hashlib.sha256()

    def received(self, payload: bytes) -> Turn:
        """Takes the commands that host 0 sent.

        Raises:
            RankDivergence: It read other tokens than this host, which would now make other calls.
        """
        commands = decode(payload[SHORT:])
        if not commands.compare and payload[:SHORT] != self._read.digest()[:SHORT]:
            number = self._channel.hosts.number
            error = RankDivergence(f"sampled tokens: expected those of host 0, found others on host {number}", HINT)
            self._channel.fail(error.message, DIVERGED)
            raise error
        return self.turn(commands)

    def turn(self, commands: Commands) -> Turn:
        """Sends the commands where this is host 0, and takes them."""
        if self._channel.leads:
            self._channel.send(TURN, self._read.digest()[:SHORT] + encode(commands))
        with self._channel.together():
            digests = self._compared() if commands.compare else ()
            turn = super().turn(commands)
        self._read.update(b"".join(each.token.to_bytes(4, "little", signed=True) for each in turn.emitted))
        return turn._replace(digests=digests)

    def cancel_all(self) -> None:
        """Ends everything on all hosts."""
        if self._channel.leads:
            self._channel.send(END)
        super().cancel_all()
        self._channel.finish()

    def _compared(self) -> tuple[bytes, ...]:
        """The digest of every host, of what it read since the last time."""
        mine, self._read = self._read.digest(), hashlib.sha256()
        return self._channel.gather(mine)


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
        RankDivergence: This host read other tokens than host 0; or all compared theirs, and some had read others: that
            is raised once host 0 has ended, too.
    """
    loaded = load(
        artifact, target=target, programs=programs, check=check, report=report, hosts=hosts, agreed=agreed(overlap)
    )
    from ling3export.runners.engine.driving import driving

    channel, turns = loaded.channel, driving(loaded, overlap=overlap).turns
    assert channel is not None and isinstance(turns, SharedTurns)
    report(f"host {hosts.number}: {loaded.weight_bytes:,} bytes of weights; following host 0")
    diverged: RankDivergence | None = None
    with channel.together():
        while (message := channel.take())[0] != END:
            digests = turns.received(message[1]).digests
            try:
                check_digests(digests)
            except RankDivergence as error:
                diverged = error
        turns.cancel_all()
    if diverged is not None:
        raise diverged

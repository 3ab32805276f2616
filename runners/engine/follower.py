"""The hosts beside host 0: each takes the steps that host 0 takes, and prints nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path

from ling3export.errors import RankDivergence
from ling3export.runners.engine.assembly import load_parts
from ling3export.runners.hosts.channel import END
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.load.loader import say


def check_digests(digests: Sequence[bytes]) -> None:
    """Compares what each host read; none or one is always right.

    Args:
        digests: 32 bytes a host, by number.

    Raises:
        RankDivergence: They differ.
    """
    others = [number for number, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise RankDivergence(
            f"sampled tokens: expected the same on {len(digests)} processes, found others than on process 0 on "
            f"{', '.join(map(str, others))}"
        )


def follow(
    artifact: str | Path, hosts: Hosts, *, target: str | None = None, programs: str = "prebuilt-only",
    check: str = "all", overlap: bool = True, report: Callable[[str], None] = say,
) -> None:  # fmt: skip
    """Loads the artifact on a host other than 0, and takes the steps that host 0 takes until host 0 ends.

    Args:
        artifact: Its folder, with the same content on every host.
        hosts: This process's place.
        target: The same as on host 0, like all that follows.
        programs: ``prebuilt-only``, or ``allow-compile``.
        check: ``all``, or ``programs``.
        overlap: Dispatch the next step before the tokens of the last one are read.
        report: Told what was chosen and why.

    Raises:
        ArtifactError, HostsError: The artifact cannot be loaded here, or not with the other hosts (``load``).
        RankDivergence: This host read other tokens than host 0. Or all compared theirs and some differed: then it is
            raised once host 0 has ended.
    """
    parts = load_parts(
        artifact, target=target, programs=programs, check=check, overlap=overlap, hosts=hosts, report=report
    )
    from ling3export.runners.engine.core import SharedCore

    channel, core = parts.loaded.channel, parts.core
    assert channel is not None and isinstance(core, SharedCore)
    report(f"host {hosts.number}: {parts.loaded.weight_bytes:,} bytes of weights; following host 0")
    diverged: RankDivergence | None = None
    with channel.together():
        while (message := channel.take())[0] != END:
            digests = core.received(message[1]).digests
            try:
                check_digests(digests)
            except RankDivergence as error:
                diverged = error
        core.cancel_all()
    if diverged is not None:
        raise diverged

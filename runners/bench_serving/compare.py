"""Configurations measured one after the other: servers are started on loopback, one client measures all over HTTP."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.errors import RequestError, listed
from ling3export.machine.targets import platforms_here
from ling3export.runners.bench_serving.measure import Measurement, Progress, Settings, measure
from ling3export.runners.bench_serving.server_process import RUNNER, ServerProcess
from ling3export.runners.state.layout import description_of

FORMS = re.compile(r"(?P<count>\d{1,3})x(?P<tp>\d{1,4})|(?P<prefill>\d{1,4})P(?P<decode>\d{1,4})D", re.ASCII)
MODEL = "bench"  # what started servers call their model: one name on all
SPARE = 64  # connections of a server in addition to those of requests


@dataclass(frozen=True)
class ServingConfig:
    """One configuration of ``--configs``.

    Attributes:
        url: A server that is there already.
        prefill: Devices of the server that prefills for the other one; 0 if each does both.
        decode: Devices of each server that answers.
        count: Number of servers that answer.
    """

    name: str
    url: str | None = None
    prefill: int = 0
    decode: int = 0
    count: int = 1


class Placement(NamedTuple):
    """The artifact and target that a server runs."""

    role: str
    artifact: Path
    target: str
    manifest: Manifest

    @property
    def described(self) -> Target:
        """The target's record."""
        return self.manifest.targets[self.target]

    def record(self) -> dict[str, Any]:
        """The server in the record of a measurement."""
        placed = {"role": self.role, "tp": self.described.tp, "target": self.target}
        return placed | {"artifact": self.artifact.name, "sha256": self.manifest.sha256}


def parse_config(text: str) -> ServingConfig:
    """``NxT``, N engines of T devices each; ``nPmD``, n devices that prefill and m that decode; or ``NAME=URL``.

    Raises:
        RequestError: It is none of these, or a number is 0.
    """
    name, equal, url = text.partition("=")
    if equal and name and url:
        return ServingConfig(name, url)
    match = FORMS.fullmatch(text)
    if match is None:
        raise RequestError(
            f"config `{text[:100]}`: expected NxT (N engines of T devices each), nPmD (n devices that prefill, m that "
            "decode) or NAME=URL (a server), found another",
            "write 1x16, 2x8, 4P4D or mine=http://127.0.0.1:8000",
        )
    numbers = {name: int(number) for name, number in match.groupdict().items() if number is not None}
    if 0 in numbers.values():
        raise RequestError(f"config `{text}`: expected 1 or more of each, found 0", "write 1x16, 2x8 or 4P4D")
    if "tp" in numbers:
        return ServingConfig(text, decode=numbers["tp"], count=numbers["count"])
    return ServingConfig(text, prefill=numbers["prefill"], decode=numbers["decode"])


def compared(
    settings: Settings,
    configs: Sequence[str],
    artifacts: Sequence[Path],
    carrier: str,
    progress: Callable[[str], AbstractContextManager[Progress | None]],
) -> Iterator[Measurement]:
    """Measures configurations with one workload, one after the other.

    Args:
        settings: Shared by all. The artifact with the smallest context gives tokenizer and bounds.
        configs: In the form of :func:`parse_config`.
        artifacts: Each server runs the one with a target of as many devices.
        carrier: How states go from one server to another.
        progress: Shows the progress of the configuration with a name.

    Raises:
        RequestError: A configuration is wrong, or not exactly one artifact fits it. Nothing was started.
        Ling3Error: A server does not start, or cannot be measured. The servers that were started have ended.
    """
    parsed = [parse_config(config) for config in configs]
    if len(parsed) < 2:
        raise RequestError(f"compare: expected two configurations or more, found {len(parsed)}", "--configs 1x2,1P1D")
    manifests = {path: read_manifest(path) for path in dict.fromkeys(artifacts)}
    places = [placements_of(config, manifests) for config in parsed]
    settings = replace(settings, artifact=min(manifests, key=lambda path: manifests[path].plan.context))
    for config, placed in zip(parsed, places, strict=True):
        with ExitStack() as stack:
            shown, urls = stack.enter_context(progress(config.name)), list[str]()
            called = replace(settings, url=config.url)
            if config.url is None:
                url, urls = stack.enter_context(running(config.name, placed, settings, carrier))
                called = replace(settings, url=url, model=MODEL)
                if config.count > 1:  # the request before the run reaches one of them
                    for server in urls:
                        measure(replace(called, url=server, num_prompts=1, request_rate=math.inf))
            done = measure(called, shown, behind=urls)
        yield replace(done, servers=tuple(place.record() for place in placed))


def placements_of(config: ServingConfig, manifests: Mapping[Path, Manifest]) -> list[Placement]:
    """The placement of each server of a configuration, the one that prefills first; none for a server by its URL.

    Raises:
        RequestError: Not exactly one artifact fits.
    """
    if config.url is not None:
        return []
    if not config.prefill:
        return [_place(config, "both", config.decode, manifests)] * config.count
    p, d = (_place(config, role, getattr(config, role), manifests) for role in ("prefill", "decode"))
    ours, theirs = (description_of(place.manifest, place.described) for place in (p, d))
    if different := [name for name in ours if ours[name] != theirs[name]]:
        raise RequestError(
            f"config `{config.name}`: expected artifacts whose states fit, found {p.artifact.name} and "
            f"{d.artifact.name} with other {listed(different)}",
            "build both from one checkpoint, with the same dtype and page size",
        )
    return [p, d]


def _place(config: ServingConfig, role: str, tp: int, manifests: Mapping[Path, Manifest]) -> Placement:
    platforms, apart = platforms_here(), role != "both"
    places = [
        Placement(role, path, name, manifest)
        for path, manifest in manifests.items()
        for name in sorted(manifest.targets)
    ]
    fits = [
        place
        for place in places
        if place.described.tp == tp and place.described.processes == 1 and place.described.platform in platforms
    ]
    able = [place for place in fits if not apart or place.described.paddings("offload")]
    if len(able) == 1:
        return able[0]
    moving = " with programs that move states" if apart else ""
    named = listed([f"{place.target} of {place.artifact.name}" for place in able or places])
    raise RequestError(
        f"config `{config.name}`: expected one target of TP={tp} for this machine{moving}, found "
        f"{named if able else f'none among {named}'}",
        f"name only one artifact with such a target; ling3export build CHECKPOINT tp{tp}.ling3 --tp {tp}"
        f"{' --snapshots 8' * apart} builds it",
    )


@contextmanager
def running(
    name: str, places: Sequence[Placement], settings: Settings, carrier: str
) -> Iterator[tuple[str, list[str]]]:
    """Servers, with a router before several: the address that clients call, and those of the servers.

    Raises:
        Ling3Error: One of them does not start; the others have ended.
    """
    connections = settings.num_prompts + SPARE
    options: list[object] = ["--max-connections", connections, "--port", 0]
    served = ["--model", MODEL, "--max-requests", connections, *options]
    served += ["--programs", settings.engine.programs, "--check", settings.engine.check]
    if settings.engine.step_timeout is not None:
        served += ["--step-timeout", settings.engine.step_timeout]
    key = {} if settings.key is None else {"LING3_API_KEY": settings.key}
    with ExitStack() as stack:
        moving: list[object] = ["--transfer", carrier]
        if carrier == "file" and len(places) > 1:
            moving += ["--transfer-folder", stack.enter_context(TemporaryDirectory(prefix="ling3-states-"))]
        servers = []
        for number, place in enumerate(places, 1):
            words = [*RUNNER, "serve", place.artifact, "--target", place.target, *served]
            words += [] if place.role == "both" else ["--role", place.role, *moving]
            called = place.role if place.role != "both" else "server" if len(places) == 1 else f"server {number}"
            server = ServerProcess(f"config `{name}`, {called} (TP={place.described.tp})", words, key)
            servers.append(stack.enter_context(server))
        urls = [server.address() for server in servers]
        if len(urls) == 1:
            yield urls[0], urls
            return
        roles = ["--prefill" if place.role == "prefill" else "--decode" for place in places]
        pairs = [word for pair in zip(roles, urls, strict=True) for word in pair]
        router = ServerProcess(f"config `{name}`, router", [*RUNNER, "route", *pairs, *options], key)
        yield stack.enter_context(router).address(), urls

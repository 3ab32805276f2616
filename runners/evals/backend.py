"""What answers an evaluation's prompts: a small protocol, and the engine that implements it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from ling3export.runners.engine.request import Completion, Request, Sampling
from ling3export.runners.evals.tasks import Prompt
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.load.environment import compiler_flags

OVERLAP, PREFIX_CACHE = False, False  # the settings of the reference evaluation


@dataclass(frozen=True)
class Ask:
    """One prompt of an evaluation, with how it is to be answered.

    Attributes:
        name: What messages call it.
        prompt: A text, token ids, or messages.
        max_tokens: Most tokens that are generated.
        sampling: How tokens are taken from logits.
        stop: Strings that end the text.
        logits: Whether the completion has the logits of each token, too.
    """

    name: str
    prompt: Prompt
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logits: bool = False


class Backend(Protocol):
    """What answers prompts."""

    def check(self, ask: Ask) -> None:
        """Raises RequestError for a prompt that can never be served: it is too long, for example."""

    def generate(self, asks: Sequence[Ask]) -> list[Completion]:
        """Completes a batch, in order. An exception is an infrastructure error of the whole batch."""

    def stats(self) -> dict[str, Any]:
        """The engine's counters since its start."""

    def digests(self) -> Sequence[bytes]:
        """The digest of the tokens that each host read since the last call, by host; nothing on one host alone."""

    def environment(self) -> dict[str, Any]:
        """What decides the tokens beside the prompts: artifact, versions, devices, paddings, as JSON."""


class EngineBackend(Backend, AbstractContextManager["EngineBackend"]):
    """An artifact, loaded by the engine.

    Args:
        artifact: The artifact's folder.
        target: Name of a target; None takes the only one that fits this machine.
        programs: ``prebuilt-only``, or ``allow-compile``.
        check: ``all``, or ``programs``.
        hosts: This process's place among several hosts, which is the first; None if it runs alone.
        step_timeout: Seconds after which a call of the devices that did not return stops the engine.
        prefix_cache: Whether prompts that begin alike are computed once.

    Raises:
        ArtifactError: The artifact is missing, damaged, or not for this machine under this policy.
        HostsError: The other hosts are not there in time, or load something else.
    """

    def __init__(
        self, artifact: str | Path, *, target: str | None = None, programs: str = "prebuilt-only", check: str = "all",
        hosts: Hosts | None = None, step_timeout: float | None = None, prefix_cache: bool = PREFIX_CACHE,
    ) -> None:  # fmt: skip
        from ling3export.runners.engine.engine import Engine

        self._prefix_cache = prefix_cache
        self._engine = Engine(
            artifact, target=target, programs=programs, check=check, overlap=OVERLAP, hosts=hosts,
            step_timeout=step_timeout, prefix_cache=prefix_cache,
        )  # fmt: skip

    def check(self, ask: Ask) -> None:
        self._engine.check(self._request(ask))

    def generate(self, asks: Sequence[Ask]) -> list[Completion]:
        """Completes a batch, in order.

        Raises:
            RequestError: One of the prompts can never be served; then none is started.
        """
        return self._engine.complete([self._request(ask) for ask in asks])

    def stats(self) -> dict[str, Any]:
        return self._engine.stats()

    def digests(self) -> Sequence[bytes]:
        return self._engine.digests()

    def environment(self) -> dict[str, Any]:
        manifest = self._engine.manifest
        plan, target = manifest.plan, manifest.targets[self._engine.target]
        jax = sys.modules["jax"]
        devices, flags = jax.devices(), compiler_flags()
        return {
            "artifact": manifest.sha256,
            "weights": manifest.weights_digest,
            "producer": manifest.producer,
            "target": self._engine.target,
            "tp": target.tp,
            "programs": sorted(target.cells),
            "verdicts": sorted({verdict.status.name for verdict in self._engine.verdicts.values()}),
            "dtype": plan.dtype,
            "paddings": list(plan.paddings),
            "decode_paddings": list(plan.decode_paddings),
            "max_running": plan.max_running,
            "page_size": plan.page_size,
            "context": self._engine.limits.context,
            "overlap": OVERLAP,
            "prefix_cache": self._prefix_cache,
            "devices": f"{len(devices)} × {devices[0].device_kind}",
            "python": ".".join(map(str, sys.version_info[:3])),
            "versions": {name: _version(name) for name in ("ling3export", "jax", "jaxlib", "numpy", "tokenizers")},
            "xla_flags": flags.get("XLA_FLAGS", ""),
            "libtpu_init_args": flags.get("LIBTPU_INIT_ARGS", ""),
            "memory_fraction": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"),
            "memory_limit": _memory_limit(),
            "git_commit": _git_commit(Path(__file__).resolve()),
        }

    def _request(self, ask: Ask) -> Request:
        return self._engine.request(
            ask.prompt, ask.max_tokens, ask.sampling, ask.stop, logits=ask.logits, name=ask.name
        )

    def __exit__(self, *_: object) -> None:
        self._engine.close()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _memory_limit(path: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """Number of bytes that the control group may use; None if there is no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _git_commit(file: Path) -> str | None:
    """The commit that is checked out where ``file`` lies; None if that repository does not track it.

    An installed package may lie in a repository of something else: in a project's virtual environment, for example.
    """
    for command in (["ls-files", "--error-unmatch", str(file)], ["rev-parse", "HEAD"]):
        try:
            done = subprocess.run(
                ["git", *command], cwd=file.parent, capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
    return done.stdout.strip()

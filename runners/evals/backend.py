"""What answers prompts in an evaluation: a small protocol, and the engine behind it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ling3export.runners.engine.request import Completion, Sampling
from ling3export.runners.evals.tasks import Prompt
from ling3export.runners.hosts.hosts import Hosts

OVERLAP = False  # the setting of the reference evaluation


@dataclass(frozen=True)
class Ask:
    """One prompt of an evaluation.

    Attributes:
        name: What messages call it.
        prompt: A text, token ids, or messages.
        max_tokens: At most this many are generated.
        sampling: How tokens are taken.
        stop: Strings that end the text.
        logits: Also return the logits of each token.
    """

    name: str
    prompt: Prompt
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logits: bool = False


class Backend(Protocol):
    """What answers prompts."""

    def generate(self, asks: Sequence[Ask]) -> list[Completion]:
        """Completes a batch, in order. What it raises is an infrastructure error of the whole batch."""

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""

    def digests(self) -> Sequence[bytes]:
        """Of each process that takes the same steps, by number, the digest of what it read since the last call.

        Nothing where there is one process.
        """

    def environment(self) -> dict[str, Any]:
        """What decides the tokens beside the prompts: artifact, versions, devices, paddings, as JSON."""


class EngineBackend:
    """An artifact, loaded by the engine.

    Args:
        artifact: Its folder.
        target: Which target; None takes the only one that fits this machine.
        programs: ``prebuilt-only``, or ``allow-compile``.
        check: ``all``, or ``programs``.
        hosts: Where several run together: this process's place, which is the first.

    Raises:
        ArtifactError: The artifact is missing, damaged, or not for this machine under this policy.
        HostsError: The other hosts are not there in time, or load something else.
    """

    def __init__(
        self, artifact: str | Path, *, target: str | None = None, programs: str = "prebuilt-only", check: str = "all",
        hosts: Hosts | None = None,
    ) -> None:  # fmt: skip
        from ling3export.runners.engine.engine import Engine

        self._engine = Engine(artifact, target=target, programs=programs, check=check, overlap=OVERLAP, hosts=hosts)

    def generate(self, asks: Sequence[Ask]) -> list[Completion]:
        """Completes a batch, in order.

        Raises:
            RequestError: A prompt that can never be served; then none is started.
        """
        return self._engine.complete(
            [
                self._engine.request(
                    ask.prompt, ask.max_tokens, ask.sampling, ask.stop, logits=ask.logits, name=ask.name
                )
                for ask in asks
            ]
        )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """Counters since the start."""
        return self._engine.stats()

    def digests(self) -> Sequence[bytes]:
        """Of each host, by number, the digest of the tokens that it read since the last call."""
        return self._engine.digests()

    def environment(self) -> dict[str, Any]:
        """Artifact, versions, devices and settings, as JSON."""
        manifest, plan = self._engine.manifest, self._engine.manifest["plan"]
        target = manifest["targets"][self._engine.target]
        jax = sys.modules["jax"]
        devices = jax.devices()
        return {
            "artifact": manifest["sha256"],
            "weights": manifest["weights"]["digest"],
            "producer": manifest["producer"],
            "target": self._engine.target,
            "tp": target["tp"],
            "programs": sorted(target["cells"]),
            "verdicts": sorted({v.status.name for v in self._engine.verdicts.values()}),
            **{name: plan.get(name) for name in ("dtype", "paddings", "decode_paddings", "max_running", "page_size")},
            "context": self._engine.limits.context,
            "overlap": OVERLAP,
            "devices": f"{len(devices)} × {devices[0].device_kind}",
            **machine_environment(),
        }

    def __enter__(self) -> "EngineBackend":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()


def machine_environment() -> dict[str, Any]:
    """Versions, flags and limits of this process, as JSON."""
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": {name: _version(name) for name in ("ling3export", "jax", "jaxlib", "numpy", "tokenizers")},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_init_args": os.environ.get("LIBTPU_INIT_ARGS", ""),
        "memory_fraction": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"),
        "memory_limit": _memory_limit(),
        "git_commit": _git_commit(Path(__file__).resolve().parent),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _memory_limit(path: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """Bytes that the control group may use; None where there is no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _git_commit(folder: Path) -> str | None:
    """The commit that the code stands at; None outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None

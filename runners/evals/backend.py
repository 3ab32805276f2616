"""What answers an evaluation's prompts: a small protocol, and the engine that implements it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ling3export.foundation.errors import RankDivergence, RequestError
from ling3export.foundation.extras import installed
from ling3export.machine.environment import compiler_flags, memory_limit
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.engine.request import Completion, Request, Sampling
from ling3export.runners.evals.tasks import Prompt
from ling3export.runners.evals.trials import EvalError, InfraError
from ling3export.runners.fleet.cluster import Cluster, Work

OVERLAP = False  # of the reference evaluation


@dataclass(frozen=True)
class PromptRequest:
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


@dataclass(frozen=True)
class PromptResult:
    """What came of one prompt.

    Attributes:
        said: The completion, or the error that ended it.
        attempts: The errors of attempts that failed, in order.
    """

    said: Completion | Exception
    attempts: tuple[InfraError, ...] = ()


def _untold() -> None:
    """Nobody asks how far a batch is."""


class EvalBackend(Protocol):
    """What an evaluation needs: answers to batches, and what decides them.

    Attributes:
        ended: Called as each prompt of a batch ends, where answers are made in this process.
    """

    ended: Callable[[], None] = staticmethod(_untold)

    def answers(self, batches: Iterable[Sequence[PromptRequest]], retry: int) -> Iterator[Sequence[PromptResult]]:
        """The answers to each batch, in order.

        Args:
            batches: Taken one at a time by a single engine, and ahead by several.
            retry: How often a prompt is tried again after an infrastructure error.
        """

    def stats(self) -> dict[str, Any]:
        """The engine's counters since its start."""

    def digests(self) -> Sequence[bytes]:
        """The digest of the tokens that each host read since the last call, by host; nothing on one host alone."""

    def environment(self) -> dict[str, Any]:
        """What decides the tokens beside the prompts: artifact, versions, devices, paddings, as JSON."""


class EngineBackend(EvalBackend, AbstractContextManager["EngineBackend"]):
    """An artifact, loaded by an engine, which is closed with this."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def answers(self, batches: Iterable[Sequence[PromptRequest]], retry: int) -> Iterator[Sequence[PromptResult]]:
        return (answered(self, batch, retry) for batch in batches)

    def check(self, ask: PromptRequest) -> None:
        """Raises RequestError for a prompt that can never be served: it is too long, for example."""
        self._engine.check(self._request(ask))

    def generate(self, asks: Sequence[PromptRequest]) -> list[Completion]:
        """Completes a batch, in order.

        Raises:
            RequestError: One of the prompts can never be served; then none is started.
        """
        return self._engine.complete([self._request(ask) for ask in asks], self.ended)

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
            "overlap": self._engine.config.overlap,
            "prefix_cache": self._engine.config.prefix_cache,
            "devices": f"{len(devices)} × {devices[0].device_kind}",
            "python": ".".join(map(str, sys.version_info[:3])),
            "versions": {name: installed(name) for name in ("ling3export", "jax", "jaxlib", "numpy", "tokenizers")},
            "xla_flags": flags.get("XLA_FLAGS", ""),
            "libtpu_init_args": flags.get("LIBTPU_INIT_ARGS", ""),
            "memory_fraction": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION"),
            "memory_limit": memory_limit(),
            "git_commit": git_commit(Path(__file__).resolve()),
        }

    def _request(self, ask: PromptRequest) -> Request:
        return self._engine.request(
            ask.prompt, ask.max_tokens, ask.sampling, stop=ask.stop, logits=ask.logits, name=ask.name
        )

    def __exit__(self, *_: object) -> None:
        self._engine.close()


class ClusterBackend(EvalBackend):
    """Engines of a cluster. Each answers one batch at a time, so batches are those of a single engine."""

    def __init__(self, cluster: Cluster, artifact: Path, config: EngineConfig) -> None:
        self._cluster, self._work = cluster, Work(artifact, config, _batch_answers, _description)
        self._environment = cluster.description(self._work)

    def answers(self, batches: Iterable[Sequence[PromptRequest]], retry: int) -> Iterator[Sequence[PromptResult]]:
        return self._cluster.results(self._work, ((batch, retry) for batch in batches), self._environment)

    def stats(self) -> dict[str, Any]:
        """Empty: each engine has its own counters."""
        return {}

    def digests(self) -> Sequence[bytes]:
        """Empty: each engine is one host."""
        return ()

    def environment(self) -> dict[str, Any]:
        return self._environment


def _batch_answers(engine: Engine, piece: tuple[Sequence[PromptRequest], int]) -> list[PromptResult]:
    return answered(EngineBackend(engine), *piece)


def _description(engine: Engine) -> dict[str, Any]:
    return EngineBackend(engine).environment()


def answered(backend: EngineBackend, asks: Sequence[PromptRequest], retry: int) -> list[PromptResult]:
    """The answers to a batch. Prompts that are refused are left out first."""
    refused: dict[int, PromptResult] = {}
    served: list[PromptRequest] = []
    for place, ask in enumerate(asks):
        try:
            backend.check(ask)
            served.append(ask)
        except RequestError as error:
            refused[place] = PromptResult(error)
    # The failure of a batch says nothing yet about any one of its prompts: each gets another attempt in any case.
    done = iter(_answers(backend, served, retry if len(served) == 1 else max(retry, 1)) if served else ())
    return [refused[place] if place in refused else next(done) for place in range(len(asks))]


def _answers(
    backend: EngineBackend, asks: Sequence[PromptRequest], tries: int, failed: tuple[InfraError, ...] | None = None
) -> list[PromptResult]:
    """Completes a batch. After an error it tries the halves, down to the prompts that are at fault.

    Args:
        backend: Answers.
        asks: The batch.
        tries: How often a prompt alone is tried again.
        failed: The error of the whole batch, once it has failed, and those of a prompt alone; None before.
    """
    try:
        done = backend.generate(asks)
        if len(done) != len(asks):
            raise EvalError(f"backend: expected {len(asks)} completions, found {len(done)}")
        return [PromptResult(each, failed or ()) for each in done]
    except (RankDivergence, EngineStopped):
        raise
    except Exception as error:
        # What is refused was not started, and that is said of one prompt alone.
        attempt = () if isinstance(error, RequestError) else (InfraError.of(error),)
        if len(asks) == 1:
            failed = (*(failed or ()), *attempt)
            final = not attempt or tries == 0
            return [PromptResult(error, failed)] if final else _answers(backend, asks, tries - 1, failed)
        failed = attempt if failed is None else failed
    halves = asks[: len(asks) // 2], asks[len(asks) // 2 :]
    return [each for half in halves for each in _answers(backend, half, tries - (len(half) == 1), failed)]


def git_commit(file: Path) -> str | None:
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

"""The source of an evaluation's answers: a small protocol, and the engine that implements it."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ling3export.foundation.errors import RankDivergence, RequestError, listed
from ling3export.foundation.extras import installed
from ling3export.machine.environment import compiler_flags, memory_limit
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import EngineStopped
from ling3export.runners.engine.request import Completion, Request, Sampling
from ling3export.runners.evals.run_file import Prompt
from ling3export.runners.evals.trials import EvalError, InfraError
from ling3export.runners.fleet.cluster import Cluster, ClusterError, Work


@dataclass(frozen=True)
class PromptRequest:
    """A prompt of an evaluation, and the settings of its answer."""

    name: str  # for messages
    prompt: Prompt
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()  # strings that end the text


@dataclass(frozen=True)
class PromptResult:
    """The result of a prompt."""

    outcome: Completion | Exception
    attempts: tuple[InfraError, ...] = ()  # the errors of attempts that failed, in order


class EvalBackend(Protocol):
    """Answers the prompts of an evaluation."""

    # Called as each prompt of a batch ends, where answers are made in this process.
    ended: Callable[[], None] = staticmethod(lambda: None)

    def answers(self, batches: Iterable[Sequence[PromptRequest]], retry: int) -> Iterator[Sequence[PromptResult]]:
        """The answers to each batch, in order.

        Args:
            batches: A single engine takes one at a time; a cluster takes all before it starts.
        """

    def digests(self) -> Sequence[bytes]:
        """The digest of the tokens that each host read since the last call, by host; empty on one host."""
        return ()

    def environment(self) -> dict[str, Any]:
        """All that decides the tokens with the prompts: artifact, versions, devices, paddings, as JSON."""


class EngineBackend(EvalBackend, AbstractContextManager["EngineBackend"]):
    """An engine in this process, which is closed with this."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def answers(self, batches: Iterable[Sequence[PromptRequest]], retry: int) -> Iterator[Sequence[PromptResult]]:
        return (answered(self, batch, retry) for batch in batches)

    def check(self, prompt: PromptRequest) -> None:
        """Raises RequestError for a prompt that can never be served: it is too long, for example."""
        self._engine.check(self._request(prompt))

    def generate(self, prompts: Sequence[PromptRequest]) -> list[Completion]:
        """Completes a batch, in order; RequestError if one of the prompts can never be served: then none is started."""
        return self._engine.complete([self._request(prompt) for prompt in prompts], self.ended)

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
        }

    def _request(self, prompt: PromptRequest) -> Request:
        return self._engine.request(
            prompt.prompt, prompt.max_tokens, prompt.sampling, stop=prompt.stop, name=prompt.name
        )

    def __exit__(self, *_: object) -> None:
        self._engine.close()


class ClusterBackend(EvalBackend):
    """Engines of a cluster. Each answers one batch at a time, so batches are those of a single engine."""

    def __init__(self, cluster: Cluster, artifact: Path, config: EngineConfig) -> None:
        self._cluster, self._work = cluster, Work(artifact, config, _batch_answers)
        ((self._environment, _),) = cluster.results(self._work, [((), 0)])

    def answers(self, batches: Iterable[Sequence[PromptRequest]], retry: int) -> Iterator[Sequence[PromptResult]]:
        mine = self._environment
        for environment, results in self._cluster.results(self._work, ((batch, retry) for batch in batches)):
            if environment != mine:
                names = [name for name in sorted({*environment, *mine}) if environment.get(name) != mine.get(name)]
                hint = "all nodes need the same artifact and the same versions of Python's packages"
                raise ClusterError(f"ray: nodes differ in {listed(names)}", hint)
            yield results

    def environment(self) -> dict[str, Any]:
        return self._environment


def _batch_answers(
    engine: Engine, piece: tuple[Sequence[PromptRequest], int]
) -> tuple[dict[str, Any], list[PromptResult]]:
    backend = EngineBackend(engine)
    return backend.environment(), answered(backend, *piece)


def answered(backend: EngineBackend, prompts: Sequence[PromptRequest], retry: int) -> list[PromptResult]:
    """The answers to a batch. Prompts that are refused are left out first."""
    refused: dict[int, PromptResult] = {}
    served: list[PromptRequest] = []
    for place, prompt in enumerate(prompts):
        try:
            backend.check(prompt)
            served.append(prompt)
        except RequestError as error:
            refused[place] = PromptResult(error)
    done = iter(_answers(backend, served, retry) if served else ())
    return [refused[place] if place in refused else next(done) for place in range(len(prompts))]


def _answers(
    backend: EngineBackend, prompts: Sequence[PromptRequest], tries: int, failed: tuple[InfraError, ...] = ()
) -> list[PromptResult]:
    """Completes a batch. If it fails, each of its prompts is tried by itself."""
    try:
        done = backend.generate(prompts)
        if len(done) != len(prompts):
            raise EvalError(f"backend: {len(prompts)} prompts got {len(done)} completions")
        return [PromptResult(completion, failed) for completion in done]
    except (RankDivergence, EngineStopped):
        raise
    except Exception as error:
        refused = isinstance(error, RequestError)  # a refused prompt was not started
        failed = failed if refused else (*failed, InfraError.of(error))
        if len(prompts) == 1 and (refused or tries == 0):
            return [PromptResult(error, failed)]
    tries = max(tries, 1) - 1
    return [result for prompt in prompts for result in _answers(backend, [prompt], tries, failed)]

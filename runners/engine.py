"""An artifact that answers requests, in process: many at once, over the slots and pages of its pools."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from types import TracebackType
from typing import Any

from ling3export.errors import RequestError
from ling3export.runners.loader import load, say
from ling3export.runners.request import Completion, Limits, Request, Sampling, token_ids
from ling3export.runners.sequence import Sequence
from ling3export.runners.tokenizer import TokenizerFiles

Prompt = str | Many[int]


class Engine:
    """An artifact, loaded. Not thread-safe: one thread drives it.

    Args:
        artifact: Its folder.
        target: Which target; None takes the only one that fits this machine.
        programs: ``prebuilt-only``, or ``allow-compile``.
        check: ``all``, or ``programs``: weights are used without checking their digests.
        overlap: Dispatch the next step before the tokens of the last one are read. The tokens are the same.
        report: Told what was chosen and why; stderr by default.

    Attributes:
        manifest: The artifact's.
        target: Name of the target that runs.
        limits: What one request may ask for.
        verdicts: Of every program.
        timings: Seconds of each stage of the start.

    Raises:
        ArtifactError: The artifact is missing, damaged, or not for this machine under this policy.
    """

    def __init__(
        self, artifact: str | Path, *, target: str | None = None, programs: str = "prebuilt-only", check: str = "all",
        overlap: bool = True, report: Callable[[str], None] = say,
    ) -> None:  # fmt: skip
        loaded = load(artifact, target=target, programs=programs, check=check, report=report)
        # numpy comes with these: it is imported once the environment is set.
        from ling3export.runners.allocator import Allocator
        from ling3export.runners.scheduler import Scheduler, Shapes

        self.manifest = loaded.manifest
        self.target = loaded.target
        self.verdicts = loaded.verdicts
        self.timings = loaded.timings
        state, plan = loaded.record["state"], loaded.manifest["plan"]
        self.limits = Limits(
            min(plan["context"], state["max_pages"] * state["page_size"]), self.manifest["config"]["vocab_size"],
            state["pages"], state["page_size"],
        )  # fmt: skip
        self._files = TokenizerFiles(loaded.folder, loaded.manifest)
        self._eos = self._files.eos_token_ids()
        self._compiles = loaded.compiles
        self._device = loaded.device
        self._allocator = Allocator.of(state)
        self._scheduler = Scheduler(loaded.device, Shapes.of(loaded.record), self._allocator, ahead=1 if overlap else 0)
        self._arrived = 0

    def generate(
        self, prompts: Many[Prompt], *, max_tokens: int, temperature: float = Sampling.temperature,
        top_k: int = Sampling.top_k, top_p: float = Sampling.top_p, seed: int = Sampling.seed,
        stop: str | Iterable[str] = (), ignore_eos: bool = False, logits: bool = False,
        names: Many[str] | None = None,
    ) -> list[Completion]:  # fmt: skip
        """Completes prompts, all together.

        Args:
            prompts: Each a text, or a list of token ids.
            max_tokens: At most this many tokens each; the context may end one sooner.
            temperature: 0 takes the best token.
            top_k: Keep only the best k tokens; 0 keeps all.
            top_p: Then keep the fewest tokens that hold this probability; 1 keeps all.
            seed: Of the sampling; the same for every prompt, so equal prompts get equal answers.
            stop: Strings that end the text.
            ignore_eos: Go on behind an end-of-text token.
            logits: Also return the logits that each token was taken from.
            names: What messages call the prompts; ``prompt 0`` and so on by default.

        Returns:
            One completion a prompt, in order.

        Raises:
            RequestError: A prompt that can never be served; then none is started.
        """
        if isinstance(prompts, str) or any(isinstance(prompt, int) for prompt in prompts):
            raise RequestError("prompts: expected a list of prompts, found a single one", "write [prompt]")
        how = Sampling(temperature, top_k, top_p, seed)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        names = [f"prompt {number}" for number in range(len(prompts))] if names is None else names
        return self.complete(
            [
                Request(self._prompt_ids(prompt, name), max_tokens, how, stops, ignore_eos, logits, name)
                for prompt, name in zip(prompts, names, strict=True)
            ]
        )

    def complete(self, requests: Many[Request]) -> list[Completion]:
        """Completes requests, each with settings of its own, all together.

        Raises:
            RequestError: A request that can never be served; then none is started.
        """
        for request in requests:
            self._check(request)
        sequences = [self._submit(request) for request in requests]
        try:
            self._run(sequences)
        except BaseException:
            for sequence in sequences:
                self._scheduler.cancel(sequence)
            raise
        return [sequence.completion() for sequence in sequences]

    def stats(self) -> dict[str, Any]:
        """Counters since the start, as JSON: cells, tokens, compiling; and the seconds of the start's stages."""
        return {
            "target": self.target,
            **self._scheduler.counters.record(),
            "compile_events": self._compiles.count,
            "seconds": {name: round(seconds, 4) for name, seconds in self.timings.seconds.items()},
        }

    def close(self) -> None:
        """Drops programs, weights and state."""
        del self._device, self._scheduler

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prompt_ids(self, prompt: Prompt, name: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
                raise RequestError(f"{name}: expected text in Unicode, found half a character (a lone surrogate)")
            return tuple(self._files.tokenizer(f"{name}: text in").encode(prompt))
        return token_ids(prompt, name)

    def _check(self, request: Request) -> None:
        self.limits.check(request)
        if request.stop:
            self._files.tokenizer(f"{request.name}: stop strings")
            if "" in request.stop:
                raise RequestError(
                    f"{request.name}: expected stop strings of at least one character, found an empty one"
                )

    def _submit(self, request: Request) -> Sequence:
        stream = self._files.tokenizer("text out").stream(request.stop) if self._files.there else None
        sequence = Sequence(request, self._arrived, self.limits.answer(request), self._eos, stream)
        self._arrived += 1
        self._scheduler.submit(sequence)
        return sequence

    def _run(self, sequences: list[Sequence]) -> None:
        first = "first_step" not in self.timings.seconds
        while not all(sequence.over for sequence in sequences):
            if first:
                with self.timings.stage("first_step"):
                    while not self._scheduler.step():
                        pass
                first = False
            else:
                self._scheduler.step()

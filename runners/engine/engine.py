"""An artifact that answers requests, in process: many at once, over the slots and pages of its pools."""

import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling3export.foundation.errors import RequestError, shown
from ling3export.runners.engine.assembly import load_parts
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.handle import EngineStopped, RequestDelta, RequestHandle
from ling3export.runners.engine.request import Completion, Limits, Request, Sampling
from ling3export.runners.engine.score import Score, Text, check_cells, pair_ids, scored
from ling3export.runners.engine.validation import token_ids
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.load.loader import say
from ling3export.runners.text.tokenizer import Message, TokenizerFiles

if TYPE_CHECKING:
    from ling3export.runners.state.prefix_cache import Event
    from ling3export.runners.transfer.http import HttpStore
    from ling3export.runners.transfer.transfer_queue import TransferQueue

Prompt = str | Many[int] | Many[Message]
SAMPLING = frozenset(field.name for field in fields(Sampling))


class Engine:
    """An artifact, loaded. Any thread and any event loop may use it; a thread of its own drives the devices.

    Args:
        hosts: This process's place where several run together, which is the first; the others call ``follower.follow``.
        report: Told what was chosen and why; stderr by default.
        tell: Told, in the engine's thread, which blocks prompts can hit from now on and which not any more.
        settings: Fields of ``EngineConfig`` that replace those of ``config``: ``Engine(path, max_requests=8)``.

    Attributes:
        verdicts: Whether each program fits this machine, by cell.
        timings: Seconds that each stage of the start took.

    Raises:
        ArtifactError: The artifact is missing, damaged, or not for this machine under this policy.
        RequestError: A setting has a value that it cannot have.
        Ling3Error: jax runs already in this process, with too few devices.
    """

    def __init__(
        self,
        artifact: str | Path,
        config: EngineConfig | None = None,
        *,
        hosts: Hosts | None = None,
        report: Callable[[str], None] = say,
        tell: "Callable[[Event], None] | None" = None,
        **settings: Any,
    ) -> None:
        if hosts is not None and hosts.number:
            raise RequestError(f"engine: expected it on host 0, found host {hosts.number}", "the others call follow()")
        self.config = config = replace(config or EngineConfig(), **settings)
        self._parts = parts = load_parts(artifact, config, hosts, report, tell)
        from ling3export.runners.engine.loop import Loop  # with numpy

        loaded = parts.loaded
        self.manifest = loaded.manifest
        self.target = loaded.target
        self.verdicts, self.timings = loaded.verdicts, loaded.timings
        self.files: TokenizerFiles = parts.files
        self.limits: Limits = parts.limits
        self._record, self._artifact = loaded.record, artifact
        self._transfers: TransferQueue | None = None
        if config.transfer is not None:
            from ling3export.runners.transfer.transfer_queue import transfer_queue  # with all carriers

            self._transfers = transfer_queue(loaded.manifest, loaded.record, config.transfer, report)
        self._loop = Loop(
            parts.core,
            self.timings,
            config.max_requests,
            step_timeout=config.step_timeout,
            transfers=self._transfers,
            store=parts.store,
        )
        if loaded.channel is not None and config.linger:
            loaded.channel.outlive(self._loop.abandon, config.linger)
        closed = ExitStack()  # from the last one on
        for part in (parts.store, self._transfers, parts.core.executor, loaded.programs, self._loop):
            if part is not None:
                closed.callback(part.close)
        self._close = weakref.finalize(self, closed.close)  # also at the end of the process

    def generate(
        self, prompts: Many[Prompt], *, max_tokens: int, names: Many[str] | None = None, **settings: Any
    ) -> list[Completion]:
        """Completes prompts, all together.

        Args:
            prompts: Each a text, a list of token ids, or messages for the chat template.
            max_tokens: At most this many tokens each; the context may end one sooner.
            names: The prompts' name in messages; ``prompt 0`` and so on by default.
            settings: Fields of ``Sampling`` and other fields of ``Request``, the same for every prompt: equal prompts
                get equal answers.

        Returns:
            One completion a prompt, in order.

        Raises:
            RequestError: A prompt that can never be served; then none is started.
            EngineStopped: The engine was closed, or a step failed.
        """
        one = isinstance(prompts, str) or not isinstance(prompts, Iterable)
        if one or any(isinstance(prompt, (int, dict)) for prompt in prompts):
            raise RequestError("prompts: expected a list of prompts, found a single one", "write [prompt]")
        names = [f"prompt {number}" for number in range(len(prompts))] if names is None else names
        pairs = zip(prompts, names, strict=True)
        return self.complete([self.request(prompt, max_tokens, name=name, **settings) for prompt, name in pairs])

    def score(self, pairs: Many[tuple[Text, Text]], *, names: Many[str] | None = None) -> list[Score]:
        """Scores continuations after contexts, all together; other requests go on meanwhile.

        Args:
            pairs: Context and continuation, both as texts or both as token ids; each of at least one token. Texts are
                encoded together and cut after the context's tokens.
            names: The pairs' name in messages; ``pair 0`` and so on by default.

        Returns:
            One score a pair, in order.

        Raises:
            ArtifactError: The target has no score programs; with the command that adds them.
            RequestError: A pair that can never be served; then none is started.
            EngineStopped: The engine was closed, or a step failed.
            Ling3Error: The model gives a number that is not finite.
        """
        check_cells(self._record, self.target, self._artifact)
        names = [f"pair {number}" for number in range(len(pairs))] if names is None else names
        requests = []
        for (context, continuation), name in zip(pairs, names, strict=True):
            ids, first = pair_ids(context, continuation, partial(self.prompt_ids, name=name), name)
            requests.append(Request(ids, 0, name=name, score_from=first))
        done = self.complete(requests)
        return [scored(completion, request) for completion, request in zip(done, requests, strict=True)]

    def stream(self, prompt: Prompt, *, max_tokens: int, **settings: Any) -> AsyncGenerator[RequestDelta, None]:
        """One prompt's answer as it comes: ``async for piece in engine.stream(prompt, max_tokens=100)``.

        The prompt is checked at once, and submitted when iteration begins. The devices never wait for the reader: what
        it did not take is joined into one piece. Leaving the iteration early cancels the request. The settings are
        those of ``generate``.

        Raises:
            RequestError: The request can never be served.
        """
        request = self.request(prompt, max_tokens, **settings)
        self.check(request)
        return self._pieces(request)

    def request(
        self,
        prompt: Prompt,
        max_tokens: int,
        sampling: Sampling | None = None,
        *,
        name: str = "prompt",
        special: bool = True,
        **settings: Any,
    ) -> Request:
        """A request of a text, token ids or messages.

        Args:
            sampling: How tokens are taken; by default as ``Sampling()`` says.
            special: Begin a text with the special tokens that the tokenizer adds by itself.
            settings: Fields of ``Sampling``, which replace those of ``sampling``, and other fields of ``Request``.

        Raises:
            RequestError: The prompt is none of them, another argument is of a wrong type or out of its bounds, or the
                artifact has no tokenizer or chat template for it.
        """
        options = Sampling() if sampling is None else sampling
        if chosen := {key: settings.pop(key) for key in SAMPLING & settings.keys()}:
            options = replace(options, **chosen)
        return Request(self.prompt_ids(prompt, name, special=special), max_tokens, options, name=name, **settings)

    def submit(self, *requests: Request, checked: bool = False) -> list[RequestHandle]:
        """Starts requests, and returns at once: a handle each, to wait for, read from, or cancel. They arrive together.

        Raises:
            RequestError: One can never be served; then none is started.
            QueueFull: There would be more than max_requests; none was started.
            EngineStopped: The engine was closed, or failed earlier.
        """
        for request in () if checked else requests:
            self.check(request)
        return self._loop.submit(requests)

    def check_room(self, count: int) -> None:
        """Refuses ``count`` more requests that would be too many now, before anything is made of them.

        Raises:
            QueueFull: There would be more than max_requests. ``submit`` may say so later all the same.
        """
        self._loop.check_room(count)

    def complete(self, requests: Many[Request], ended: Callable[[], None] = lambda: None) -> list[Completion]:
        """Completes requests, each with settings of its own, all together; cancels them all if it is interrupted.

        Args:
            ended: Called once for each request, in their order, when it and those before it have ended.

        Raises:
            RequestError, QueueFull, EngineStopped: For the reasons that ``submit`` gives.
        """
        handles = self.submit(*requests)
        try:
            completions = []
            for handle in handles:
                completions.append(handle.result())
                ended()
            return completions
        finally:
            for handle in handles:
                handle.cancel()

    def digests(self) -> tuple[bytes, ...]:
        """sha256 of the tokens that each host read since the last call, by host; nothing where one host runs alone.

        Raises:
            EngineStopped: The engine was closed, or a step failed.
        """
        return self._loop.compare() if self._parts.loaded.channel else ()

    def check(self, request: Request) -> None:
        """Refuses what can never be served. Raises RequestError: why, with the sum where something is too large."""
        if not isinstance(request, Request):
            raise RequestError(f"request: expected a Request, found {shown(request)}", "engine.request makes one")
        self.limits.check(request)
        self.check_transfer(request)
        if request.grammar is not None:
            self.files.grammars(self.limits.vocab_size).check(request.grammar, request.name)
        if request.score_from is not None:
            check_cells(self._record, self.target, self._artifact)
        if request.stop:
            self.files.tokenizer(f"{request.name}: stop strings")

    def check_transfer(self, request: Request) -> None:
        """Refuses a request whose state comes or goes where this engine carries none.

        Raises:
            RequestError: The engine has no role for it.
        """
        if request.do_remote_decode or request.do_remote_prefill:
            self.config.check_transfer(request.name, gives=request.do_remote_decode)

    def stats(self) -> dict[str, Any]:
        """Counters since the start and what is held now, as JSON; and the seconds of the start's stages."""
        parts, state = self._parts, self._record.state
        loaded, blocks, counted = parts.loaded, parts.blocks, parts.counters.record()
        if parts.cache is not None:
            counted["prefix_cache"] |= parts.cache.record()
        snapshots = {"snapshots": state.snapshots} if state.snapshots else {}
        kept = {"snapshots": blocks.free_snapshots} if state.snapshots else {}
        return {
            "target": self.target,
            **counted,
            "live": self._loop.live,
            "free": {"slots": blocks.free_slots, "pages": blocks.free_pages} | kept,
            "pools": {"slots": state.slots, "pages": state.pages} | snapshots,
            "weight_bytes": loaded.weight_bytes,
            "compile_events": loaded.compiles.count,
            "seconds": {name: round(seconds, 4) for name, seconds in self.timings.seconds.copy().items()},
            **({"transfer": self._transfers.record()} if self._transfers else {}),
            **({"prefix_store": parts.store.record()} if parts.store else {}),
        }

    @property
    def shared_states(self) -> "HttpStore | None":
        """The states that this process's server gives to others; None where it gives none."""
        from ling3export.runners.transfer.http import HttpStore

        store = None if self._transfers is None else self._transfers.store
        return store if isinstance(store, HttpStore) else None

    @property
    def stopped(self) -> EngineStopped | None:
        """Why it takes no requests; None while it does."""
        return self._loop.stopped

    def settle(self) -> None:
        """Waits until every program has loaded; requests are served from the first ones on.

        Raises:
            ArtifactError: One does not load; a request that needs it would end the engine.
        """
        self._parts.loaded.programs.settle()

    def close(self) -> None:
        """Ends the engine's thread and drops programs, weights and state; unfinished requests get EngineStopped.

        May be called again.
        """
        self._close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _pieces(self, request: Request) -> AsyncGenerator[RequestDelta, None]:
        (handle,) = self._loop.submit([request])
        try:
            async for piece in handle.pieces():
                yield piece
        finally:
            handle.cancel()

    def prompt_ids(self, prompt: Prompt, name: str, *, special: bool = True) -> tuple[int, ...]:
        """The token ids of a prompt; the arguments and errors are those of ``request``."""
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            prompt, special = self.files.render_chat(prompt, name=name), False
        if not isinstance(prompt, str):
            return token_ids(prompt, name)
        tokenizer = self.files.tokenizer(f"{name}: text in")
        try:
            size = len(prompt.encode())
        except UnicodeEncodeError:
            raise RequestError(f"{name}: expected text in Unicode, found half a character (a lone surrogate)") from None
        self.limits.check_text(size, name)
        return tuple(tokenizer.encode(prompt, special=special))

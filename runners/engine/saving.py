"""Requests that go on later or elsewhere: between an engine and a file, which has a ``SequenceState``."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.handle import RequestHandle
from ling3export.runners.engine.loop import Loop
from ling3export.runners.engine.request import Completion, Request, request_of
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.state.layout import description_of, layout_of
from ling3export.runners.state.sequence_state import (
    SequenceState,
    StateFileError,
    TransferredState,
    load_state,
    refused,
    save_state,
    token_of,
)


def check_savable(request: Request) -> None:
    """Refuses a request that no file can hold.

    Raises:
        RequestError: It scores, asks for logits, or its state goes to another engine.
    """
    reasons = {
        "scores": request.score_from is not None,
        "logits": request.logits,
        "do_remote_decode": request.do_remote_decode,
    }
    if names := [name for name, applies in reasons.items() if applies]:
        raise RequestError(f"{request.name}: expected tokens alone where a state is saved, found {names[0]}")


def save(loop: Loop, manifest: Manifest, target: Target, source: Request | RequestHandle, path: Path) -> Completion:
    """Ends a request and writes where it is; the arguments and errors are those of ``Engine.save``."""
    layout = layout_of(target, "save")
    request = source.request if isinstance(source, RequestHandle) else source
    check_savable(request)
    if isinstance(source, RequestHandle):
        handle, saved = source, loop.save(source)
    else:
        saved = Future[Sequence]()
        (handle,) = loop.submit([request], saved=saved)
    try:
        sequence = saved.result()
        done = handle.result()
    finally:
        handle.cancel()
    if done.stop_reason == "cancelled":
        raise RequestError(f"{request.name}: expected a request that goes on, found it cancelled")
    save_state(path, _saved(sequence, description_of(manifest, target)), layout)
    return done


def resumed(manifest: Manifest, target: Target, path: Path, max_tokens: int | None) -> tuple[Request, TransferredState]:
    """The contents of a file; the errors are those of ``Engine.resume``."""
    state = load_state(path, layout_of(target, "resume"), description_of(manifest, target))
    try:
        request = request_of(state.descriptor["request"])
        tokens = tuple(
            token_of(token, logprobs, manifest.vocab_size) for token, logprobs in state.descriptor["generated"]
        )
        check_savable(request)
    except (LookupError, TypeError, ValueError) as error:
        raise refused(path, str(error) if isinstance(error, ValueError) else "another form") from error
    known = [*request.prompt_ids, *(token for token, _ in tokens)]
    if state.stop >= len(known) or len(tokens) > request.max_tokens:
        actual = f"{state.stop} stored of {len(known)}, {len(tokens)} of {request.max_tokens} generated"
        raise StateFileError(f"state `{path.name}`: expected fewer positions than tokens, found {actual}")
    if state.first or state.tokens.tolist() != known[: state.stop]:
        raise refused(path, "the state of other tokens")
    if max_tokens is not None:
        request = replace(request, max_tokens=max_tokens)
    return request, TransferredState(tokens, state if state.stop else None)


def _saved(sequence: Sequence, description: Mapping[str, object]) -> SequenceState:
    """The part of a sequence that goes on. An answer that ended by itself may be stored beyond its end, and needs no
    state."""
    ids, logprobs = sequence.generated, sequence.output.logprobs
    tokens = tuple(zip(ids, logprobs if len(logprobs) == len(ids) else [None] * len(ids), strict=True))
    fields = asdict(replace(sequence.request, kv_transfer_params=None))
    descriptor = {"state": description, "request": fields, "generated": tokens}
    if sequence.exported_state is None or not 0 < sequence.num_computed_tokens < sequence.num_tokens:
        return SequenceState(descriptor, np.empty(0, np.int32), {})
    return SequenceState.of(sequence.exported_state(), descriptor, sequence.tokens(0, sequence.num_computed_tokens))

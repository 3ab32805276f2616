"""Requests that go on later or elsewhere: between an engine and a file (:mod:`ling3export.runners.state.saved`)."""

from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.errors import RequestError
from ling3export.runners.engine.handle import RequestHandle
from ling3export.runners.engine.loop import Loop
from ling3export.runners.engine.request import Completion, Request, request_of
from ling3export.runners.engine.sequence import Sequence
from ling3export.runners.state.form import Carried, description_of, layout_of
from ling3export.runners.state.saved import Saved, StateFileError, read_saved, write_saved


def check_savable(request: Request) -> None:
    """Refuses a request that no file can hold.

    Raises:
        RequestError: It scores, asks for logits, or its state goes to another engine.
    """
    reasons = {"scores": request.score_from is not None, "logits": request.logits, "do_remote_decode": request.leaves}
    if found := [name for name, there in reasons.items() if there]:
        raise RequestError(f"{request.name}: expected tokens alone where a state is saved, found {found[0]}")


def save(loop: Loop, manifest: Manifest, target: Target, asked: Request | RequestHandle, path: Path) -> Completion:
    """Ends a request and writes where it is; the arguments and errors are those of ``Engine.save``."""
    layout = layout_of(target, "save")
    request = asked.request if isinstance(asked, RequestHandle) else asked
    check_savable(request)
    if isinstance(asked, RequestHandle):
        handle, saved = asked, loop.save(asked)
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
    write_saved(path, _saved(sequence), layout, description_of(manifest, target))
    return done


def resumed(manifest: Manifest, target: Target, path: Path, max_tokens: int | None) -> tuple[Request, Carried]:
    """What a file holds; the errors are those of ``Engine.resume``."""
    layout = layout_of(target, "resume")
    saved = read_saved(path, layout, description_of(manifest, target), manifest.vocab_size)
    try:
        request = request_of(saved.request)
        check_savable(request)
    except (LookupError, TypeError) as error:
        raise StateFileError(
            f"state `{path.name}`: expected a request, found another form, in {path.parent}"
        ) from error
    known = len(request.prompt_ids) + len(saved.tokens)
    if saved.stored >= known or len(saved.tokens) > request.max_tokens:
        found = f"{saved.stored} stored of {known}, {len(saved.tokens)} of {request.max_tokens} generated"
        raise StateFileError(f"state `{path.name}`: expected fewer positions than tokens, found {found}")
    if max_tokens is not None:
        request = replace(request, max_tokens=max_tokens)
    return request, Carried(saved.tokens, saved.stored, saved.state)


def _saved(sequence: Sequence) -> Saved:
    """What of a sequence goes on. An answer that ended by itself may be stored beyond its end, and needs no state."""
    said = sequence.likely if len(sequence.likely) == sequence.known - sequence.length else [None] * sequence.known
    tokens = tuple(zip(sequence.generated, said, strict=False))
    fields = asdict(replace(sequence.request, kv_transfer_params=None))
    if sequence.taken is None or not 0 < sequence.stored < sequence.known:
        return Saved(fields, tokens, 0, None)
    return Saved(fields, tokens, sequence.stored, sequence.taken().whole())

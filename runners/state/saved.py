"""A sequence in a file: any engine of the same model and weights goes on from it, whatever its TP, paddings and pools.

The file is a safetensors file of ``mla.latent`` [layers, tokens, width], ``kda.recurrent`` [layers, heads, key, value]
and ``kda.conv`` [layers, 3, heads, key, taps], in this order; of none of them where no state is kept. Its metadata has
``ling3.state``, a JSON object of the version, what the state is of, the request, the tokens that were generated and how
many positions are stored; and ``sha256``, of that text and the tensors' bytes.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ling3export.artifacts.files import replacing
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.reading import opened
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.load.kept import Whole
from ling3export.runners.state.form import Token, canonical, empty, storable, token_of
from ling3export.runners.transfer.folder import LENGTH, safetensors_head, safetensors_metadata
from ling3export.runners.transfer.objects import Kind, Layout, check_same_state

VERSION = 1
RECORD, DIGEST = "ling3.state", "sha256"
LARGEST_HEAD = 64 << 20  # bytes before the tensors: prompt and answer, with 20 likely tokens each


class StateFileError(Ling3Error):
    """A file is no whole saved state."""


class Saved(NamedTuple):
    """A sequence as it was when it was saved.

    Attributes:
        request: The fields of what was asked.
        tokens: Those that were generated.
        stored: How many positions the state is of; 0 where none is kept.
        state: The state; None where none is kept.
    """

    request: Mapping[str, Any]
    tokens: tuple[Token, ...]
    stored: int
    state: Whole | None


def write_saved(path: Path, saved: Saved, layout: Layout, description: Mapping[str, object]) -> None:
    """Writes a file, which is there whole and durable or not at all; one of this name is replaced.

    Raises:
        ArtifactError: It cannot be written.
    """
    arrays = {}
    if saved.state is not None:
        own = canonical(layout, saved.state)
        for name, shape, dtype in _tensors(layout, saved.stored):
            array = own[name]
            if _paged(layout, name):
                array = array[:, 1:].reshape(shape[0], -1, shape[2])[:, : saved.stored]
            arrays[name] = np.ascontiguousarray(array.reshape(shape), BY_NAME[dtype].numpy)
    record = {
        "version": VERSION,
        "state": description,
        "request": saved.request,
        "tokens": saved.tokens,
        "stored": saved.stored,
    }
    text = json.dumps(record)
    digest = hashlib.sha256(text.encode())
    for array in arrays.values():
        digest.update(_bytes(array))
    head = safetensors_head(_tensors(layout, saved.stored), {RECORD: text, DIGEST: digest.hexdigest()})
    with replacing(path, len(head) + sum(array.nbytes for array in arrays.values())) as file:
        file.write(head)
        for array in arrays.values():
            file.write(_bytes(array))


def read_saved(path: Path, layout: Layout, description: Mapping[str, object], vocab_size: int) -> Saved:
    """Reads what ``write_saved`` wrote.

    Args:
        path: The file.
        layout: What states of this artifact hold.
        description: What decides whether they fit.
        vocab_size: Token ids are below it.

    Raises:
        StateFileError: The file is missing, cut, damaged, or something else.
        StateMismatch: It is of another model, of other weights, or of other dtypes.
    """
    try:
        with opened(path.parent, path.name) as file:
            metadata = safetensors_metadata(file.read(LENGTH.size), file.read, LARGEST_HEAD)
            text, digest = metadata.get(RECORD), metadata.get(DIGEST)
            if not isinstance(text, str) or not isinstance(digest, str):
                raise ValueError("a file without a saved state")
            record = parse_json(text.encode(), LARGEST_HEAD)
            if not isinstance(record, dict) or record.get("version") != VERSION:
                raise ValueError("a state of another version")
            state, stored = record.get("state"), record.get("stored")
            if not isinstance(state, dict) or type(stored) is not int or stored < 0:
                raise ValueError("a state of another form")
            check_same_state(description, state)
            tensors = _tensors(layout, stored)
            head = safetensors_head(tensors, metadata)
            sizes = [BY_NAME[dtype].nbytes * math.prod(shape) for _, shape, dtype in tensors]
            file.seek(0)
            if (size := os.fstat(file.fileno()).st_size) != len(head) + sum(sizes) or file.read(len(head)) != head:
                raise ValueError(f"{size:,} bytes in a file of {len(head) + sum(sizes):,}, or another header")
            payload = np.empty(sum(sizes), np.uint8)
            whole = file.readinto(payload.data) == payload.nbytes
        checked = hashlib.sha256(text.encode())
        checked.update(payload.data)
        if not whole or checked.hexdigest() != digest:
            raise ValueError("bytes of another digest")
        tokens = tuple(token_of(token, likely, vocab_size) for token, likely in record["tokens"])
        request = dict(record["request"])
    except OSError as error:
        raise _refused(path, str(error.strerror)) from error
    except (LookupError, TypeError, ValueError) as error:
        raise _refused(path, str(error) or "another form") from error
    if not stored:
        return Saved(request, tokens, 0, None)
    own, at = empty(layout, -(-stored // layout.block)), 0
    for (name, shape, dtype), size in zip(tensors, sizes, strict=True):
        array = payload[at : at + size].view(BY_NAME[dtype].numpy).reshape(shape)
        if _paged(layout, name):
            pages = np.zeros((shape[0], own[name].shape[1] * layout.block - layout.block, shape[2]), array.dtype)
            pages[:, :stored] = array
            own[name][:, 1:] = pages.reshape(shape[0], -1, layout.block, shape[2])
        else:
            own[name][:, 0] = array
        at += size
    return Saved(request, tokens, stored, storable(own))


def _tensors(layout: Layout, stored: int) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of each tensor of a file."""
    return [
        (piece.name, (layout.layers[piece.kind], *layout.shape(piece, (0, layout.heads), stored)), piece.dtype)
        for piece in layout.pieces
        if stored
    ]


def _paged(layout: Layout, name: str) -> bool:
    return any(piece.name == name and piece.kind == Kind.BLOCK for piece in layout.pieces)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _refused(path: Path, found: str) -> StateFileError:
    return StateFileError(
        f"state `{path.name}`: expected a whole file that Engine.save wrote, found {found}, in {path.parent}",
        "copy it again, or save it again",
    )

"""One sequence's state: the only thing that is kept in a folder or handed to another process.

Its arrays are in canonical order, which knows neither devices nor TP nor pages. Its bytes are a safetensors file of
``kda.recurrent`` [layers, heads, key, value], ``tokens`` [tokens], ``mla.latent`` [layers, tokens, width] and
``kda.conv`` [layers, 3, heads, key, taps], or of none of them where no state is kept. The file's metadata has
``ling3.state``, a JSON object (the version, the position of the first token, the descriptor), and ``crc32``, of that
text and all tensors. A crc32 finds damage, not forgery.
"""

import io
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.strict_json import parse_json
from ling3export.runners.load.sharded import ShardedState
from ling3export.runners.state.layout import (
    CONV,
    FORMAT,
    LATENT,
    POOLS,
    RECURRENT,
    TOKENS,
    Form,
    StateLayout,
    check_same_state,
    nbytes,
)

LENGTH = struct.Struct("<Q")
LARGEST_HEAD = 1 << 20  # bytes before the tensors
RECORD, CHECK = "ling3.state", "crc32"
ALIGNED = 64
MOST_LIKELY = 20  # tokens next to the one that was sampled

Arrays = Mapping[str, np.ndarray]
Token = tuple[int, tuple[float, tuple[tuple[int, float], ...]] | None]  # and what request.Logprobs says of it


@dataclass(frozen=True, eq=False)
class SequenceState:
    """The state after a sequence's tokens.

    Attributes:
        descriptor: A JSON object: ``state``, which decides what artifacts can continue from it (``description_of``),
            and what its writer adds.
        tokens: int32 ``[n]``: those whose latents are here.
        arrays: By name, in canonical order: the latents of these tokens, and the recurrent and conv state after the
            last of them. Empty where there is no token.
        first: The position of the first of the tokens. Another state has the tokens before it.
    """

    descriptor: Mapping[str, Any]
    tokens: np.ndarray
    arrays: Arrays
    first: int = 0

    @property
    def stop(self) -> int:
        return self.first + len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def pool_arrays(self, page: int) -> dict[str, np.ndarray]:
        """The arrays as a program stores them, by the name of the pool: latents in pages of ``page`` tokens."""
        latents, conv = self.arrays[LATENT], self.arrays[CONV].transpose(0, 2, 4, 1, 3)
        layers, count, width = latents.shape
        if count % page:
            whole = np.zeros((layers, -(-count // page) * page, width), latents.dtype)
            whole[:, :count] = latents
            latents = whole
        return {
            POOLS[LATENT]: latents.reshape(layers, -1, page, width),
            POOLS[RECURRENT]: self.arrays[RECURRENT],
            POOLS[CONV]: conv.reshape(*conv.shape[:2], -1),
        }


class TransferredState(NamedTuple):
    """A sequence that was begun elsewhere: its tokens, and the state after them where there is one.

    Attributes:
        tokens: Those that were generated elsewhere, each with what ``request.Logprobs`` says of it, or None.
        state: The state that this engine continues from; None where it computes all of it again.
        phases: Milliseconds that the sequence spent elsewhere, by what was done; None where nobody measured them.
    """

    tokens: tuple[Token, ...]
    state: SequenceState | None
    phases: Mapping[str, float] | None = None
    nbytes: int = 0

    @property
    def stored(self) -> int:
        """How many positions the state is of."""
        return 0 if self.state is None else self.state.stop


def canonical(pools: Arrays) -> dict[str, np.ndarray]:
    """Arrays of a state as a program gave them, in canonical order; not copied.

    A row of a program's conv state has its taps first.
    """
    latents, recurrent, conv = (pools[POOLS[name]] for name in (LATENT, RECURRENT, CONV))
    rows = conv.reshape(*conv.shape[:2], -1, 3, recurrent.shape[2]).transpose(0, 3, 1, 4, 2)
    return {LATENT: latents.reshape(len(latents), -1, latents.shape[-1]), RECURRENT: recurrent, CONV: rows}


def fill(state: SequenceState, source: ShardedState | SequenceState) -> None:
    """Copies the arrays of a state, on the host or as a program gave it, into another one of the same length."""
    arrays = source.arrays if isinstance(source, SequenceState) else canonical(source.arrays())
    for name, array in arrays.items():
        state.arrays[name][...] = array[:, : len(state.tokens)] if name == LATENT else array


def token_of(token: Any, logprobs: Any, vocab_size: int) -> Token:
    """A token that another process sampled, with its log probabilities.

    Raises:
        LookupError, TypeError, ValueError: It has another form.
    """
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ValueError("a token outside of the vocabulary")
    if logprobs is None:
        return token, None
    try:
        logprob, top = logprobs
        return token, (float(logprob), tuple((int(id), float(value)) for id, value in top[:MOST_LIKELY]))
    except OverflowError as error:
        raise ValueError("a number that is none") from error


class StateBytes:
    """A state in memory as its bytes: made with empty arrays, which are filled and then sealed.

    Attributes:
        state: The state; its arrays lie in the memory.
        memory: All of it.
    """

    def __init__(
        self,
        layout: StateLayout,
        descriptor: Mapping[str, Any],
        tokens: np.ndarray,
        first: int = 0,
        allocate: Callable[[int], np.ndarray] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        record = {"version": FORMAT, "first": first, "tokens": len(tokens), **descriptor}
        self._text, self._forms = json.dumps(record), layout.forms(len(tokens))
        self._start = len(self._head(0))
        self.memory = allocate(self._start + sum(map(nbytes, self._forms)))
        arrays = _arrays(self._forms, self.memory[self._start :])
        if self._forms:
            arrays.pop(TOKENS)[:] = tokens
        self.state = SequenceState(descriptor, np.asarray(tokens, np.int32), arrays, first)

    def seal(self) -> np.ndarray:
        """Writes the head, once all arrays are filled; gives the memory."""
        checksum = zlib.crc32(self.memory[self._start :], zlib.crc32(self._text.encode()))
        self.memory[: self._start] = np.frombuffer(self._head(checksum), np.uint8)
        return self.memory

    def _head(self, checksum: int) -> bytes:
        return _head(self._forms, self._text, f"{checksum:08x}")


def read_state(
    file: BinaryIO | io.RawIOBase, size: int, layout: StateLayout, description: Mapping[str, object] | None = None
) -> SequenceState:
    """Reads a state from its bytes.

    Args:
        description: The form that must fit; by default it is taken as it is.

    Raises:
        ValueError: They are cut, damaged, or something else; the text follows "found".
        StateMismatch: The state is of another model, of other weights, or of other dtypes.
    """
    head, text, check, record = _record(file, size)
    first, tokens, described = record.pop("first", None), record.pop("tokens", None), record["state"]
    if type(first) is not int or type(tokens) is not int or not (0 <= first < 1 << 31 and 0 <= tokens < 1 << 31):
        raise ValueError("a state of another form")
    if description is not None:
        check_same_state(description, described)
    forms = layout.forms(tokens)
    if size != (whole := len(head) + sum(map(nbytes, forms))) or head != _head(forms, text, check):
        raise ValueError(f"{size:,} bytes in a file of {whole:,}, or another header")
    payload = np.empty(size - len(head), np.uint8)
    view, at = payload.data, 0
    while at < payload.nbytes and (read := file.readinto(view[at:])):  # type: ignore[union-attr]
        at += read
    if at != payload.nbytes or f"{zlib.crc32(payload, zlib.crc32(text.encode())):08x}" != check:
        raise ValueError("bytes of another digest")
    arrays = _arrays(forms, payload)
    ids = arrays.pop(TOKENS, np.empty(0, np.int32))
    return SequenceState(record, ids, arrays, first)


def _record(file: BinaryIO | io.RawIOBase, size: int) -> tuple[bytes, str, str, dict[str, Any]]:
    """The bytes before the arrays of a file of ``size`` bytes, the record's text, the crc32, and the record."""
    length = file.read(LENGTH.size)
    if len(length) != LENGTH.size or (count := LENGTH.unpack(length)[0]) > min(size, LARGEST_HEAD):
        raise ValueError("no safetensors file")
    head = length + file.read(count)
    tree = parse_json(head[LENGTH.size :], LARGEST_HEAD)
    metadata = tree.get("__metadata__") if isinstance(tree, dict) else None
    text, check = (metadata.get(name) for name in (RECORD, CHECK)) if isinstance(metadata, dict) else (None, None)
    if not isinstance(text, str):
        raise ValueError("a file without a state")
    record = parse_json(text.encode(), LARGEST_HEAD)
    if not isinstance(record, dict) or not isinstance(record.get("state"), dict):
        raise ValueError("a state of another form")
    if (version := record.pop("version", None)) != FORMAT or not isinstance(check, str):
        raise ValueError(f"version {version!r} of a state, where this is {FORMAT}"[:100])
    return head, text, check, record


def _head(forms: Iterable[Form], text: str, check: str) -> bytes:
    """The header of a safetensors file, padded to a multiple of 64 bytes."""
    tree: dict[str, Any] = {"__metadata__": {RECORD: text, CHECK: check}}
    at = 0
    for form in forms:
        name, shape, dtype = form
        end = at + nbytes(form)
        tree[name] = {"dtype": BY_NAME[dtype].code, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    data = json.dumps(tree, separators=(",", ":")).encode()
    data += b" " * (-(LENGTH.size + len(data)) % ALIGNED)
    return LENGTH.pack(len(data)) + data


def _arrays(forms: Iterable[Form], payload: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays in a payload ``[bytes]`` uint8, without copying."""
    arrays, at = {}, 0
    for form in forms:
        name, shape, dtype = form
        arrays[name] = payload[at : at + nbytes(form)].view(BY_NAME[dtype].numpy).reshape(shape)
        at += nbytes(form)
    return arrays

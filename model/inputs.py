"""The packed batch: every field of a step travels in one int32 vector (one transfer a step instead of six)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ling3export.model.geometry import CHUNK


@dataclass(frozen=True)
class Field:
    """A named range of the packed vector. Floats are bit-cast.

    Attributes:
        name: Field name of the step contract.
        offset: First element in the vector.
        shape: Shape after unpacking; ``()`` never occurs.
        dtype: ``"int32"`` or ``"float32"``.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Elements taken in the vector."""
        size = 1
        for extent in self.shape:
            size *= extent
        return size


def batch_fields(phase: str, padding: int, max_pages: int) -> tuple[Field, ...]:
    """The fields of ``phase`` at ``padding``, in packing order.

    Args:
        phase: ``prefill`` or ``score`` (padding = token slots T), ``decode`` (sequences B) or ``sample`` (rows R).
        padding: T, B or R.
        max_pages: Columns of the page table.
    """
    chunks = padding // CHUNK
    prefill: list[tuple[str, tuple[int, ...], str]] = [
        ("tokens", (padding,), "int32"),
        ("chunk_slot", (chunks,), "int32"),
        ("chunk_start", (chunks,), "int32"),
        ("chunk_len", (chunks,), "int32"),
        ("fresh", (chunks,), "int32"),
        ("page_table", (chunks, max_pages), "int32"),
    ]
    shapes: dict[str, list[tuple[str, tuple[int, ...], str]]] = {
        "prefill": prefill,
        "score": [*prefill, ("next_token", (padding,), "int32")],
        "decode": [
            ("slot", (padding,), "int32"),
            ("position", (padding,), "int32"),
            ("page_table", (padding, max_pages), "int32"),
            ("token", (padding,), "int32"),
        ],
        "sample": [
            ("slot", (padding,), "int32"),
            ("position", (padding,), "int32"),
            ("temperature", (padding,), "float32"),
            ("top_k", (padding,), "int32"),
            ("top_p", (padding,), "float32"),
            ("seed", (padding,), "int32"),
        ],
    }
    fields, offset = [], 0
    for name, shape, dtype in shapes[phase]:
        field = Field(name, offset, shape, dtype)
        fields.append(field)
        offset += field.size
    return tuple(fields)


def packed_size(fields: tuple[Field, ...]) -> int:
    """Elements of the packed vector."""
    return fields[-1].offset + fields[-1].size


def unpack(packed: jax.Array, fields: tuple[Field, ...]) -> dict[str, jax.Array]:
    """Splits ``packed`` int32 [size] into its named fields."""
    out = {}
    for field in fields:
        piece = packed[field.offset : field.offset + field.size].reshape(field.shape)
        out[field.name] = lax.bitcast_convert_type(piece, jnp.float32) if field.dtype == "float32" else piece
    return out

"""The schedule context of FfnWorkerBatching: 1024 bytes, little-endian and packed, that say where tokens are published.

Reserved bytes stay as they were read. The fields below are the layout; docs/disaggregation.md names the source.
"""

import struct
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from ling3export.foundation.errors import Ling3Error

SIZE = 1024
ALIGNMENT = 512  # bytes: the data of every pair of a token and an expert begins at a multiple of it
MOST_SESSIONS, MOST_MICRO_BATCHES, MOST_EXPERTS_A_TOKEN = 1024, 64, 64
HEAD = 2  # int32 numbers before a row's expert ids: its flag and its layer


class ContextError(Ling3Error):
    """A schedule context that is cut off, beyond its limits, or whose buffers are too small."""


def _at(offset: int, form: str = "I") -> Any:
    return field(default=0, metadata={"offset": offset, "form": f"<{form}"})


@dataclass(frozen=True)
class ScheduleContext:
    """One context. Buffers are byte offsets into a segment of shared memory, or opaque device addresses.

    A are attention sessions, M micro batches of a session in flight, BS tokens of a micro batch, K1 experts of a token,
    a shared one included, and HS the bytes from one pair's data to the next.

    Attributes:
        schedule_mode: 0 schedules the FFN side, 1 the attention side, 2 both.
        run_flag: 0 ends the worker.
        ffn_token_info_buf: int32 ``[A, M, 2 + BS * K1]``: flag, layer and expert ids of each micro batch.
        ffn_token_data_buf: uint8 ``[A, M, BS, K1, HS]``.
        polling_index: The micro batch that a scheduler looks at first.
        layer_ids_buf: int32 ``[A]``; like the next three a scheduler's output, of ``out_num`` rows.
        expert_ids_buf: int32 ``[A, BS, K1]``.
        reserved: 1024 bytes; those between the fields are kept.
    """

    session_num: int = _at(0)  # A
    micro_batch_num: int = _at(4)  # M
    micro_batch_size: int = _at(8)  # BS
    selected_expert_num: int = _at(12)  # K1
    expert_num: int = _at(16)  # of a layer
    attn_to_ffn_token_size: int = _at(20)  # HS, a multiple of 512
    ffn_to_attn_token_size: int = _at(24)
    schedule_mode: int = _at(28, "i")
    run_flag: int = _at(128, "i")
    attention_token_info_buf: int = _at(256, "Q")
    attention_token_info_size: int = _at(264, "Q")
    attention_token_data_buf: int = _at(272, "Q")
    attention_token_data_size: int = _at(280, "Q")
    attention_micro_batch_id: int = _at(288)
    ffn_token_info_buf: int = _at(384, "Q")
    ffn_token_info_size: int = _at(392, "Q")
    ffn_token_data_buf: int = _at(400, "Q")
    ffn_token_data_size: int = _at(408, "Q")
    polling_index: int = _at(416, "Q")
    layer_ids_buf: int = _at(512, "Q")
    layer_ids_size: int = _at(520, "Q")
    session_ids_buf: int = _at(528, "Q")
    session_ids_size: int = _at(536, "Q")
    micro_batch_ids_buf: int = _at(544, "Q")
    micro_batch_ids_size: int = _at(552, "Q")
    expert_ids_buf: int = _at(560, "Q")
    expert_ids_size: int = _at(568, "Q")
    out_num: int = _at(576)
    reserved: bytes = field(default=bytes(SIZE), repr=False)

    @property
    def info_shape(self) -> tuple[int, int, int]:
        """``[A, M, 2 + BS * K1]``."""
        pairs = self.micro_batch_size * self.selected_expert_num
        return self.session_num, self.micro_batch_num, HEAD + pairs

    @property
    def data_shape(self) -> tuple[int, int, int, int, int]:
        """``[A, M, BS, K1, HS]``."""
        rows = self.session_num, self.micro_batch_num, self.micro_batch_size, self.selected_expert_num
        return *rows, self.attn_to_ffn_token_size

    def build(self) -> bytes:
        """The 1024 bytes; ContextError if a number does not fit its field."""
        data = bytearray(self.reserved)
        for entry in LAYOUT:
            form, value = entry.metadata["form"], getattr(self, entry.name)
            try:
                struct.pack_into(form, data, entry.metadata["offset"], value)
            except struct.error:
                bits = 8 * struct.calcsize(form)
                raise ContextError(f"context `{entry.name}`: expected a number of {bits} bits, found {value}") from None
        return bytes(data)

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Self:
        """The context in the first 1024 bytes; ContextError if there are fewer."""
        if len(data) < SIZE:
            raise ContextError(f"context: expected {SIZE} bytes, found {len(data)}")
        head = bytes(data[:SIZE])
        numbers = {
            entry.name: struct.unpack_from(entry.metadata["form"], head, entry.metadata["offset"])[0]
            for entry in LAYOUT
        }
        blank = replace(cls(), reserved=head).build()  # fields are zero here, so that equal contexts compare equal
        return cls(**numbers, reserved=blank)

    def check(self, row_bytes: int = 1, segment: int | None = None) -> None:
        """Compares counts with their limits, and sizes of buffers with their contents.

        Args:
            row_bytes: Bytes of one pair's data, with its scale.
            segment: Bytes of the segment that buffers are offsets into; None where they are device addresses.

        Raises:
            ContextError: Names the field.
        """
        limits = (
            ("session_num", 1, MOST_SESSIONS),
            ("micro_batch_num", 1, MOST_MICRO_BATCHES),
            ("micro_batch_size", 1, 1 << 20),
            ("selected_expert_num", 1, MOST_EXPERTS_A_TOKEN),
            ("polling_index", 0, self.micro_batch_num - 1),
        )
        for name, least, most in limits:
            if not least <= getattr(self, name) <= most:
                raise ContextError(f"context `{name}`: expected {least} to {most}, found {getattr(self, name)}")
        size = self.attn_to_ffn_token_size
        if size % ALIGNMENT or size < row_bytes:
            expected = f"a multiple of {ALIGNMENT} of at least {row_bytes} bytes"
            raise ContextError(f"context `attn_to_ffn_token_size`: expected {expected}, found {size}")
        sessions, micro_batches, row = self.info_shape
        needed = {
            "ffn_token_info": 4 * sessions * micro_batches * row,
            "ffn_token_data": sessions * micro_batches * (row - HEAD) * size,
        }
        for name, count in needed.items():
            start, held = getattr(self, f"{name}_buf"), getattr(self, f"{name}_size")
            if held < count:
                raise ContextError(f"context `{name}_size`: expected at least {count} bytes, found {held}")
            if segment is not None and (start % 4 or start + held > segment):
                where = f"a place within the {segment} bytes of the segment, at a multiple of 4"
                raise ContextError(f"context `{name}_buf`: expected {where}, found {start} for {held} bytes")


LAYOUT = [entry for entry in fields(ScheduleContext) if entry.metadata]

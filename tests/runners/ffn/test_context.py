"""The codec of the schedule context."""

import random
import struct
from dataclasses import replace

import pytest

from ling3export.runners.ffn.context import LAYOUT, SIZE, ContextError, ScheduleContext

FORM = "<7Ii96xi124x4QI92x5Q88x8QI60x384x"  # the published layout in one format
SESSIONS, MICRO, TOKENS, EXPERTS, ROW = 3, 2, 2, 2, 512
INFO, DATA = SIZE, SIZE + 4 * SESSIONS * MICRO * (2 + TOKENS * EXPERTS)
CONTEXT = ScheduleContext(
    session_num=SESSIONS,
    micro_batch_num=MICRO,
    micro_batch_size=TOKENS,
    selected_expert_num=EXPERTS,
    expert_num=8,
    attn_to_ffn_token_size=ROW,
    run_flag=1,
    ffn_token_info_buf=INFO,
    ffn_token_info_size=DATA - INFO,
    ffn_token_data_buf=DATA,
    ffn_token_data_size=SESSIONS * MICRO * TOKENS * EXPERTS * ROW,
)
WHOLE = DATA + CONTEXT.ffn_token_data_size


def test_fields_lie_where_the_published_layout_has_them():
    assert struct.calcsize(FORM) == SIZE
    numbers = list(range(1, len(LAYOUT) + 1))
    context = ScheduleContext(**{each.name: number for each, number in zip(LAYOUT, numbers, strict=True)})
    assert context.build() == struct.pack(FORM, *numbers)
    assert ScheduleContext.parse(struct.pack(FORM, *numbers)) == context
    assert context.build().hex().startswith("0100000002000000030000000400000005000000060000000700000008000000")


def test_a_known_context_is_these_1024_bytes():
    """The bytes were written by hand from the published layout: two sessions of bf16 tokens of 1536."""
    fixture = {
        0: "02000000 03000000 04000000 09000000 b8000000 000c0000 000c0000 00000000",
        128: "01000000",
        256: "0000500000000000 6003000000000000 0000600000000000 00200a0000000000 02000000",
        384: "0000100000000000 9003000000000000 0000200000000000 00200a0000000000 01000000 00000000",
        512: "00e00f0000000000 0800000000000000 10e00f0000000000 0800000000000000 20e00f0000000000 0800000000000000"
        "30e00f0000000000 2001000000000000 02000000",
        1020: "deadbeef",
    }
    data = bytearray(SIZE)
    for offset, text in fixture.items():
        data[offset : offset + len(bytes.fromhex(text))] = bytes.fromhex(text)
    context = ScheduleContext.parse(data)
    assert context.data_shape == (2, 3, 4, 9, 3072) and context.info_shape == (2, 3, 38)
    assert (context.expert_num, context.ffn_to_attn_token_size) == (184, 3072)
    assert (context.run_flag, context.schedule_mode) == (1, 0)
    assert (context.attention_token_info_buf, context.attention_token_data_size) == (0x500000, 663_552)
    assert (context.attention_micro_batch_id, context.polling_index, context.out_num) == (2, 1, 2)
    assert (context.ffn_token_info_buf, context.ffn_token_info_size) == (0x100000, 4 * 2 * 3 * 38)
    assert (context.ffn_token_data_buf, context.ffn_token_data_size) == (0x200000, 4 * 9 * 3072 * 2 * 3)
    assert (context.layer_ids_buf, context.expert_ids_buf, context.expert_ids_size) == (0xFE000, 0xFE030, 4 * 2 * 36)
    assert context.build() == bytes(data)  # includes the reserved bytes at the end
    context.check(row_bytes=3072)


def test_reserved_bytes_and_every_number_survive():
    generator = random.Random(0)
    for _ in range(200):
        data = generator.randbytes(SIZE)
        context = ScheduleContext.parse(data)
        assert context.build() == data
        assert ScheduleContext.parse(context.build() + b"more") == context
        changed = replace(context, out_num=7).build()
        assert changed == data[:576] + (7).to_bytes(4, "little") + data[580:]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"session_num": 1025}, "`session_num`: expected 1 to 1024, found 1025"),
        ({"micro_batch_num": 65}, "`micro_batch_num`: expected 1 to 64, found 65"),
        ({"micro_batch_num": 0}, "`micro_batch_num`"),
        ({"selected_expert_num": 65}, "`selected_expert_num`: expected 1 to 64, found 65"),
        ({"polling_index": 2}, "`polling_index`: expected 0 to 1, found 2"),
        ({"attn_to_ffn_token_size": 513}, "a multiple of 512 of at least 1 bytes, found 513"),
        ({"attn_to_ffn_token_size": 0}, "a multiple of 512 of at least 1 bytes, found 0"),
        ({"ffn_token_data_size": 1}, "`ffn_token_data_size`: expected at least 12288 bytes, found 1"),
        ({"ffn_token_info_size": 143}, "`ffn_token_info_size`: expected at least 144 bytes, found 143"),
        ({"ffn_token_data_buf": WHOLE}, "`ffn_token_data_buf`: expected a place within"),
        ({"ffn_token_info_buf": 2**63}, "`ffn_token_info_buf`: expected a place within"),
    ],
)
def test_a_context_that_does_not_fit_is_refused(changed, message):
    with pytest.raises(ContextError) as caught:
        replace(CONTEXT, **changed).check(segment=WHOLE)
    assert message in str(caught.value)


def test_device_addresses_are_left_alone():
    replace(CONTEXT, ffn_token_data_buf=2**63, ffn_token_info_buf=2**62).check(row_bytes=ROW)
    with pytest.raises(ContextError, match="of at least 513 bytes, found 512"):
        CONTEXT.check(row_bytes=513)


def test_a_cut_context_and_a_number_that_does_not_fit_are_refused():
    with pytest.raises(ContextError, match="expected 1024 bytes, found 1023"):
        ScheduleContext.parse(bytes(SIZE - 1))
    with pytest.raises(ContextError, match="`out_num`: expected a number of 32 bits, found -1"):
        replace(CONTEXT, out_num=-1).build()

"""ffn_worker_batching against the published example and a numpy oracle of its contract, also after export."""

import re
from typing import Any

import jax
import numpy as np
import pytest

from ling3export.foundation.dtypes import MASK
from ling3export.model.ffn import FfnBatch, ffn_worker_batching

pytestmark = pytest.mark.jit

ITEM = (2, 2, 1)  # bytes of a number, by token_dtype
IDS = np.array([[[3, 0, 4], [0, MASK, 4]], [[3, 1, 4], [MASK, MASK, MASK]]], np.int32)
EXAMPLE: dict[str, Any] = {"session_ids": np.arange(2, dtype=np.int32), "micro_batch_ids": np.array([1, 0], np.int32)}
OPTIONS: dict[str, Any] = {"expert_num": 5, "max_out_shape": (2, 2, 3, 4)}


def values() -> np.ndarray:
    """A row's value in the example: 1000 s + 100 m + 10 b + k."""
    s, m, b, k = np.indices((2, 2, 2, 3))
    return 1000 * s + 100 * m + 10 * b + k


def example(**options: Any) -> FfnBatch:
    data = np.repeat(values()[..., None], 4, -1).astype(np.float16)
    batch = ffn_worker_batching(data, IDS, **EXAMPLE, **OPTIONS, **options)
    return FfnBatch(*map(np.asarray, batch))


def padded(*rows: float) -> list[float]:
    return [*rows, *[0] * (12 - len(rows))]


@pytest.mark.parametrize(("mode", "offsets"), [("group", (0, 1, 0, 0, 1, 0, 1, 2)), ("slot", (1, 0, 1, 0, 0, 2, 2, 2))])
def test_the_published_example(mode, offsets):
    batch = example(expert_offsets=mode)
    assert batch.gather_idx.tolist() == padded(1, 3, 7, 0, 6, 2, 5, 8)
    assert (batch.y == np.array(padded(101, 110, 1001, 100, 1000, 102, 112, 1002))[:, None]).all()
    assert batch.session_ids.tolist() == padded(0, 0, 1, 0, 1, 0, 0, 1)
    assert batch.micro_batch_ids.tolist() == padded(1, 1, 0, 1, 0, 1, 1, 0)
    assert batch.token_ids.tolist() == padded(0, 1, 0, 0, 0, 0, 1, 0)
    assert batch.expert_offsets.tolist() == padded(*offsets)
    assert batch.group_list.tolist() == [[0, 2], [1, 1], [3, 2], [4, 3], [0, 0]]
    assert (batch.actual_token_num, batch.dropped, batch.dynamic_scale.shape) == (8, 0, (0,))


def oracle(data, ids, sessions, micro, layers, out_num, expert_num, layer_num, mode):
    """The contract in loops: (rows of every per-token output, group_list, dropped)."""
    found: list[tuple[int, int]] = []
    dropped = 0
    _, tokens, each = ids.shape
    for g, expert in enumerate(ids.reshape(-1).tolist()):
        a = g // (tokens * each)
        if a >= out_num or not 0 <= expert < MASK:
            continue
        share = expert_num // layer_num if layer_num else expert_num
        layer = int(layers[a])
        good = expert < share and 0 <= layer < max(layer_num, 1)
        if not good or not (0 <= sessions[a] < data.shape[0] and 0 <= micro[a] < data.shape[1]):
            dropped += 1
            continue
        found.append((layer * share + expert, g))
    found.sort()
    out, groups = [], []
    for i, (expert, g) in enumerate(found):
        a, b, k = g // (tokens * each), g % (tokens * each) // each, g % each
        if i == 0 or found[i - 1][0] != expert:
            groups.append([expert, 0])
        offset = k if mode == "slot" else groups[-1][1]
        groups[-1][1] += 1
        s, m = int(sessions[a]), int(micro[a])
        out.append((data[s, m, b, k], s, m, b, offset, g))
    return out, groups + [[0, 0]] * (expert_num - len(groups)), dropped


# Sessions, micro batches, tokens, experts a token, values a row; experts, layers; the kind of expert_offsets.
SHAPES = (
    (1, 1, 1, 1, 1, 3, 0, "group"),
    (4, 2, 3, 1, 7, 5, 0, "slot"),
    (2, 3, 5, 3, 7, 4, 0, "group"),
    (3, 2, 4, 4, 8, 6, 3, "group"),
    (4, 1, 2, 2, 8, 1, 1, "slot"),
    (1, 4, 7, 3, 5, 9, 0, "group"),
)


def random_case(
    rng: np.random.Generator,
    kind: int,
    a: int,
    m: int,
    bs: int,
    k1: int,
    width: int,
    experts: int,
    layers: int,
    token_dtype: int | None,
) -> tuple[Any, ...]:
    """Arguments of one case: kind 0 masks everything, 1 sends all to one expert, 2 names sessions that do not exist."""
    ids = rng.integers(-2, experts + 2, (a, bs, k1)).astype(np.int32)
    ids[rng.random(ids.shape) < 0.3] = MASK + int(rng.integers(0, 5))
    if kind < 2:
        ids[:] = (MASK, experts // max(layers, 1) - 1)[kind]
    data = rng.integers(0, 2**16, (a, m, bs, k1, width)).astype(np.uint16).view(np.float16)
    if token_dtype is not None:
        data = rng.integers(0, 2**8, (a, m, bs, k1, width * ITEM[token_dtype] + 4 + kind)).astype(np.uint8)
    sessions = rng.integers(-1, a + 1, a) if kind == 2 else rng.permutation(a)
    numbers = (sessions, rng.integers(0, m, a), rng.integers(-1, layers + 1, a) if layers else np.zeros(a))
    return data, ids, *(each.astype(np.int32) for each in numbers), np.int32(rng.integers(0, a + 1))


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_random_cases_equal_the_oracle_to_the_bit(seed):
    """50 cases for each shape: any bits of floats, fp16, bf16 or int8 with a scale, NaN payloads, any masking."""
    rng, compared = np.random.default_rng(seed), 0
    a, _, bs, k1, width, experts, layers, mode = SHAPES[seed]
    token_dtype = (None, 1, 2, 0)[seed % 4]  # None: floats instead of bytes

    @jax.jit
    def call(data, ids, sessions, micro, layer_ids, out_num):
        return ffn_worker_batching(
            data,
            ids,
            sessions,
            micro,
            expert_num=experts,
            max_out_shape=(a, bs, k1, width),
            expert_offsets=mode,
            layer_num=layers,
            layer_ids=layer_ids if layers else None,
            out_num=out_num,
            token_dtype=token_dtype or 0,
        )

    for case in range(50):
        arguments = random_case(rng, case % 8, *SHAPES[seed][:7], token_dtype)
        batch = FfnBatch(*map(np.asarray, call(*arguments)))
        rows, groups, dropped = oracle(*arguments, experts, layers, mode)
        count = len(rows)
        assert (batch.actual_token_num, batch.dropped) == (count, dropped)
        assert batch.group_list.tolist() == groups
        names = ("session_ids", "micro_batch_ids", "token_ids", "expert_offsets", "gather_idx")
        for at, name in enumerate(names, 1):
            found = getattr(batch, name).tolist()
            assert found == [row[at] for row in rows] + [0] * (len(found) - count), name
        end, bits = batch.y.shape[1] * batch.y.itemsize, batch.y.view(np.uint8)
        assert bits[:count].tobytes() == b"".join(row[0].tobytes()[:end] for row in rows)
        assert not bits[count:].any()
        if token_dtype == 2:
            scales = batch.dynamic_scale.view(np.uint8).reshape(-1, 4)
            assert scales[:count].tobytes() == b"".join(row[0].tobytes()[end : end + 4] for row in rows)
            assert not scales[count:].any()
        places = batch.gather_idx[:count].tolist()
        assert len(set(places)) == count  # a permutation of the unmasked pairs
        compared += count
    assert compared > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_out_shape": (2, 2, 3)}, "`max_out_shape`: expected A, BS, K1 and H"),
        ({"expert_num": 0}, "`expert_num`: expected 1 to 8,192 experts, found 0"),
        ({"expert_num": 8193}, "found 8193"),
        ({"token_dtype": 3}, "`token_dtype`: expected 0 (fp16), 1 (bf16) or 2 (int8), found 3"),
        ({"token_dtype": 2}, "`token_data`: expected uint8 rows for int8 data"),
        ({"expert_offsets": "row"}, "`expert_offsets`: expected `group` or `slot`, found row"),
        ({"layer_num": 2, "layer_ids": np.zeros(2, np.int32)}, "`layer_num`: expected a divisor of 5 experts"),
        ({"layer_num": 5}, "`layer_ids`: expected them with a layer_num"),
        ({"max_out_shape": (2, 2, 3, 5)}, "`token_data`: expected [2, M, 2, 3, 5], found (2, 2, 2, 3, 4)"),
        ({"max_out_shape": (2, 3, 2, 4)}, "`expert_ids`: expected the shape (2, 3, 2)"),
    ],
)
def test_inconsistent_arguments_are_refused_while_tracing(changed, message):
    data = np.zeros((2, 2, 2, 3, 4), np.float16)
    with pytest.raises(ValueError, match=re.escape(message)):
        ffn_worker_batching(data, IDS, **EXAMPLE, **(OPTIONS | changed))

"""The FfnWorkerBatching operator as pure jax: pairs of tokens and experts, ordered by expert.

Attention sessions publish rows: for each token of a micro batch, the ids of its experts. The operator orders the
(token, expert) pairs by expert and gathers their data, so that an FFN worker computes each expert once. Source of the
operator's contract: CANN's FfnWorkerBatching; docs/disaggregation.md has the picture and says where this form differs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from ling3export.foundation.dtypes import MASK

LAST = jnp.iinfo(jnp.int32).max  # the sorting key of masked pairs
MOST_EXPERTS = 8192
SCALE_BYTES = 4
FLOAT16, BFLOAT16, INT8 = range(3)  # values of token_dtype
STORED = {FLOAT16: jnp.float16, BFLOAT16: jnp.bfloat16, INT8: jnp.int8}


class FfnBatch(NamedTuple):
    """Pairs of a token and one of its experts, ordered by expert; of ``Y`` rows the first ``actual_token_num`` hold.

    The other rows are zero. Integers are int32: jax without x64 has no others.

    """

    y: jax.Array  # [Y, H]: the tokens' data, its bits unchanged
    # int32 [expert_num, 2]: expert and number of rows, in ascending order, of experts that have rows; the rest is zero
    group_list: jax.Array
    session_ids: jax.Array  # int32 [Y]
    micro_batch_ids: jax.Array  # int32 [Y]
    token_ids: jax.Array  # int32 [Y]: the position of the token in its micro batch
    # int32 [Y]: the position among the rows of its expert ("group"), or which of its token's experts it is ("slot")
    expert_offsets: jax.Array
    dynamic_scale: jax.Array  # fp32 [Y] for int8 data, else [0]
    actual_token_num: jax.Array
    gather_idx: jax.Array  # int32 [Y]: the pair's place among the published ones, (row * BS + token) * K1 + k
    dropped: jax.Array  # int32 scalar: pairs whose expert, layer, session or micro batch does not exist; masked


def ffn_worker_batching(
    token_data: ArrayLike,
    expert_ids: ArrayLike,
    session_ids: ArrayLike,
    micro_batch_ids: ArrayLike,
    *,
    expert_num: int,
    max_out_shape: tuple[int, ...],
    token_dtype: int = FLOAT16,
    layer_ids: ArrayLike | None = None,
    layer_num: int = 0,
    out_num: ArrayLike | None = None,
    expert_offsets: str = "group",
    mask_value: int = MASK,
) -> FfnBatch:
    """Orders the published pairs by expert, ties by their place, and gathers their data.

    Args:
        token_data: ``[A, M, BS, K1, HS]``: what sessions ``A`` sent for each of their ``M`` micro batches: floats
            (``HS`` = ``H``), or uint8 rows that begin with ``H`` values; an fp32 scale (4 bytes, little-endian) follows
            them where they are int8.
        expert_ids: int32 ``[A, BS, K1]``, of the published rows; ``mask_value`` and more, or a negative number, is no
            expert.
        session_ids: int32 ``[A]``, of the published rows.
        micro_batch_ids: int32 ``[A]``
        expert_num: Experts of this worker, of all layers together.
        max_out_shape: ``(A, BS, K1, H)``.
        token_dtype: FLOAT16, BFLOAT16 or INT8: what uint8 rows hold. Floats stay what they are.
        layer_ids: int32 ``[A]``: each row's layer, with ``layer_num``: expert ``e`` of layer ``l`` is number
            ``l * (expert_num / layer_num) + e``.
        layer_num: Layers; 0 means that ``expert_ids`` are numbers of this worker already.
        out_num: How many rows are published (a scalar of the run); None means all.

    Raises:
        ValueError: While tracing: shapes, dtypes or settings that do not fit together.
    """
    token_data, expert_ids = jnp.asarray(token_data), jnp.asarray(expert_ids)
    session_ids, micro_batch_ids = jnp.asarray(session_ids), jnp.asarray(micro_batch_ids)
    layer_ids = None if layer_ids is None else jnp.asarray(layer_ids)
    _check(token_data, expert_ids, expert_num, max_out_shape, token_dtype, layer_ids, layer_num, expert_offsets)
    sessions, tokens, experts_a_token, width = max_out_shape
    pairs = tokens * experts_a_token
    ids = (expert_ids, session_ids, micro_batch_ids, layer_ids)
    key, dropped = _keys(*ids, layer_num, out_num, expert_num, mask_value, *token_data.shape[:2])
    count = jnp.sum(key != LAST, dtype=jnp.int32)
    place = jnp.arange(sessions * pairs, dtype=jnp.int32)
    live = place < count
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    gathered, experts = jnp.where(live, order, 0), jnp.where(live, key[order], 0)
    row, token, k = gathered // pairs, gathered % pairs // experts_a_token, gathered % experts_a_token
    session, micro_batch = session_ids[row], micro_batch_ids[row]
    y, scale = _rows(token_data, (session, micro_batch, token, k), live, width, token_dtype)
    rows = jnp.zeros(expert_num, jnp.int32).at[experts].add(live.astype(jnp.int32))
    offset = k if expert_offsets == "slot" else place - (jnp.cumsum(rows) - rows)[experts]
    session, micro_batch, token, offset = (jnp.where(live, ids, 0) for ids in (session, micro_batch, token, offset))
    groups = _groups(rows)
    return FfnBatch(y, groups, session, micro_batch, token, offset, scale, count, gathered, dropped)


def _check(
    token_data: Any,
    expert_ids: Any,
    expert_num: int,
    shape: tuple[int, ...],
    token_dtype: int,
    layer_ids: Any,
    layer_num: int,
    offsets: str,
) -> None:
    def require(name: str, holds: bool, expected: str, value: object) -> None:
        if not holds:
            raise ValueError(f"ffn_worker_batching `{name}`: expected {expected}, found {value}")

    data = token_data.dtype
    require("max_out_shape", len(shape) == 4, "A, BS, K1 and H", shape)
    require("expert_num", 0 < expert_num <= MOST_EXPERTS, f"1 to {MOST_EXPERTS:,} experts", expert_num)
    require("token_dtype", token_dtype in STORED, "0 (fp16), 1 (bf16) or 2 (int8)", token_dtype)
    require("expert_offsets", offsets in ("group", "slot"), "`group` or `slot`", offsets)
    divides = layer_num >= 0 and expert_num % max(layer_num, 1) == 0
    require("layer_num", divides, f"a divisor of {expert_num} experts, or 0", layer_num)
    require("layer_ids", (layer_ids is None) == (layer_num == 0), "them with a layer_num, and only then", layer_num)
    require("expert_ids", expert_ids.shape == shape[:3], f"the shape {shape[:3]}", expert_ids.shape)
    raw = data == jnp.uint8
    holds = raw or (token_dtype != INT8 and jnp.issubdtype(data, jnp.floating))
    require("token_data", holds, "uint8 rows for int8 data, else uint8 rows or floats", data)
    width = shape[3] * STORED[token_dtype].dtype.itemsize + SCALE_BYTES * (token_dtype == INT8) if raw else shape[3]
    sent = token_data.shape
    fits = len(sent) == 5 and (sent[0], *sent[2:4]) == shape[:3]
    fits = fits and (sent[4] >= width if raw else sent[4] == width)
    require("token_data", fits, f"[{shape[0]}, M, {shape[1]}, {shape[2]}, {width}{' or more' * raw}]", sent)


def _keys(
    expert_ids: jax.Array,
    session_ids: jax.Array,
    micro_batch_ids: jax.Array,
    layer_ids: jax.Array | None,
    layer_num: int,
    out_num: Any,
    expert_num: int,
    mask_value: int,
    sent: int,
    micro_batches: int,
) -> tuple[Int32[Array, "Y"], Int32[Array, ""]]:
    """Each published pair's expert number, LAST where it has none; how many have one that does not exist."""
    sessions = expert_ids.shape[0]
    published = jnp.arange(sessions) < (sessions if out_num is None else out_num)
    named = (expert_ids >= 0) & (expert_ids < mask_value) & published[:, None, None]
    exists: Bool[Array, A] = (session_ids >= 0) & (session_ids < sent)
    exists &= (micro_batch_ids >= 0) & (micro_batch_ids < micro_batches)
    a_layer, first = expert_num // max(layer_num, 1), jnp.zeros(sessions, jnp.int32)
    if layer_ids is not None:
        exists &= (layer_ids >= 0) & (layer_ids < layer_num)
        first = layer_ids * a_layer
    valid = named & exists[:, None, None] & (expert_ids < a_layer)
    key = jnp.where(valid, first[:, None, None] + expert_ids, LAST).reshape(-1)
    return key, jnp.sum(named & ~valid, dtype=jnp.int32)


def _rows(
    token_data: jax.Array, at: tuple[jax.Array, ...], live: jax.Array, width: int, token_dtype: int
) -> tuple[Shaped[Array, "Y H"], Float32[Array, "S"]]:
    """The rows' data and their scales. Bits are moved, not numbers: a NaN's payload and -0 stay."""
    raw = token_data.dtype == jnp.uint8
    kind = STORED[token_dtype] if raw else token_data.dtype
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[token_data.dtype.itemsize]
    rows = jnp.where(live[:, None], lax.bitcast_convert_type(token_data, bits)[at], jnp.zeros((), bits))
    no_scale = jnp.zeros(0, jnp.float32)
    if not raw:
        return lax.bitcast_convert_type(rows, kind), no_scale
    end = width * jnp.dtype(kind).itemsize
    if token_dtype == INT8:
        scale = lax.bitcast_convert_type(rows[:, end : end + SCALE_BYTES], jnp.float32)
        return lax.bitcast_convert_type(rows[:, :end], kind), scale
    return lax.bitcast_convert_type(rows[:, :end].reshape(len(rows), width, -1), kind), no_scale


def _groups(rows: Int32[Array, "E"]) -> Int32[Array, "E 2"]:
    """Expert and rows of the experts that have rows, in ascending order; then zeros."""
    used = rows > 0
    place = jnp.where(used, jnp.cumsum(used) - 1, len(rows))
    entries = jnp.stack([jnp.arange(len(rows), dtype=jnp.int32), rows], axis=1)
    return jnp.zeros_like(entries).at[place].set(entries, mode="drop")

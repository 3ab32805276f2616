"""The phase ``logits_processor``: logits changed before a token is drawn, and the most likely tokens.

It is a program of its own, so that ``sample`` is the same for all other calls: docs/decisions/0007-adjust.md.

Axis letters: R rows, V vocabulary, v = V/TP this device's part of it, W words of 32 bits that hold V of them, K edits,
N tokens that are ranked.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from ling3export.model.geometry import AXIS
from ling3export.model.layers import Index
from ling3export.model.sampling.sample import greedy

TOP = 20  # most likely tokens that a row can have: as many as OpenAI's API gives
NONE = jnp.iinfo(jnp.int32).max  # larger than every token
BLOCK = 128  # edits of each row that are made at a time


def adjusted(
    logits: Float32[Array, "R v"], fields: dict[str, jax.Array], edits: Int32[Array, "3 R K"], mask: Int32[Array, "R W"]
) -> Float32[Array, "R v"]:
    """The logits that tokens are drawn from where rows have edits or a mask of allowed tokens.

    An edit makes ``x`` to ``(x / scale if x > 0 else x * scale) + add``: a repetition penalty is a scale, and the
    presence penalty, the frequency penalty and a logit bias are parts of the addend. Scales are above 0 and addends
    finite. Tokens that are not allowed become -inf. A logit that is not finite stays: the row has no token, whatever
    is allowed.

    Args:
        logits: This device's part of the vocabulary.
        fields: ``edited [R]``, how many edits of each row count, and ``masked [R]``, whether the row's mask does.
        edits: Token, scale and addend of each edit, the latter two as the bits of fp32; a row names a token once.
        mask: Bit ``id % 32`` of word ``id // 32`` allows a token.
    """
    width = logits.shape[1]
    first = lax.axis_index(AXIS) * width
    # The words that hold this device's tokens, then their bits; the first bits may belong to earlier tokens.
    words = jnp.pad(mask, ((0, 0), (0, width // 32 + 2)))
    words = lax.dynamic_slice_in_dim(words, first // 32, width // 32 + 2, axis=1)
    bits = (words[:, :, None] >> jnp.arange(32)) & 1
    bits = lax.dynamic_slice_in_dim(bits.reshape(len(mask), -1), first % 32, width, axis=1)
    allowed = (bits == 1) | (fields["masked"] == 0)[:, None] | ~jnp.isfinite(logits)
    # Masked first, for the edits then need no copy of the logits. They leave -inf as it is.
    row, masked = jnp.arange(len(logits))[:, None], jnp.where(allowed, logits, -jnp.inf)

    def edit(block: jax.Array, values: jax.Array) -> jax.Array:
        token, scale, add = lax.dynamic_slice_in_dim(edits, block * BLOCK, BLOCK, axis=2)
        counts = block * BLOCK + jnp.arange(BLOCK) < fields["edited"][:, None]
        place = jnp.where(counts & (token >= first) & (token < first + width), token - first, width)
        old = jnp.take_along_axis(values, jnp.minimum(place, width - 1), axis=1)
        scale, add = (lax.bitcast_convert_type(bits, jnp.float32) for bits in (scale, add))
        return values.at[row, place].set(jnp.where(old > 0, old / scale, old * scale) + add, mode="drop")

    blocks = (jnp.max(fields["edited"]) + BLOCK - 1) // BLOCK
    with jax.named_scope("edits"):
        return lax.fori_loop(0, blocks, edit, masked)


def ranked(
    values: Float32[Array, "R N"], tokens: Int32[Array, "R N"], count: jax.Array, unrolled: bool = False
) -> tuple[Float32[Array, "R 20"], Int32[Array, "R 20"]]:
    """The ``count`` largest values of each row and their tokens; among equals the lowest token comes first.

    One look at all values for each place, without a sort: machines with matrix units sort slowly, and ``count`` is
    often one or five. Places without a value have -inf and token -1. With ``unrolled`` there is no loop.
    """

    def look(place: Index, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, ids, value, token = carry
        after = (values < value[:, None]) | ((values == value[:, None]) & (tokens > token[:, None]))
        value = jnp.max(jnp.where(after, values, -jnp.inf), axis=1)
        token = jnp.min(jnp.where(after & (values == value[:, None]), tokens, NONE), axis=1)
        return best.at[:, place].set(value), ids.at[:, place].set(jnp.where(token == NONE, -1, token)), value, token

    rows = len(values)
    empty = jnp.full((rows, TOP), -jnp.inf), jnp.full((rows, TOP), -1, jnp.int32)
    start = jnp.full((rows,), jnp.inf), jnp.full((rows,), -1, jnp.int32)
    if unrolled:
        carry: tuple[jax.Array, ...] = (*empty, *start)
        for place in range(TOP):
            carry = look(place, carry)
        best, ids = carry[:2]
        counts = jnp.arange(TOP) < count
        return jnp.where(counts, best, -jnp.inf), jnp.where(counts, ids, -1)
    with jax.named_scope("ranked"):
        return lax.fori_loop(0, count, look, (*empty, *start))[:2]


@jax.named_scope("sample")
def process_logits(
    logits: Float32[Array, "R v"],
    fields: dict[str, jax.Array],
    edits: Int32[Array, "3 R K"],
    mask: Int32[Array, "R W"],
    token: Int32[Array, "R"],
    unrolled: bool = False,
) -> dict[str, jax.Array]:
    """Before ``sample``, the logits that it is to take; after it, how likely the tokens are.

    Args:
        logits: This device's part of the vocabulary.
        fields: ``edited, masked, top``, each ``[R]``: the first two as :func:`adjusted` says; ``top`` is the number of
            most likely tokens, 0 where the log-probability of ``token`` is not needed either.
        edits: See :func:`adjusted`.
        mask: See :func:`adjusted`.
        token: The sampled token, where ``top`` is above 0.
        unrolled: For one device: see :func:`ranked`.

    Returns:
        ``logits``: this device's part, as :func:`adjusted` gives them. ``logprob [R]``: of ``token``. ``top_token`` and
        ``top_logprob [R, TOP]``: see :func:`ranked`. Log-probabilities are under the plain softmax of the logits as
        they came, and the same on every device.
    """
    count = jnp.minimum(jnp.max(fields["top"]), TOP)

    def looked_at() -> tuple[jax.Array, ...]:
        log_sum = greedy(logits)[2]
        ids = lax.axis_index(AXIS) * logits.shape[1] + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logit = lax.psum(jnp.sum(jnp.where(ids == token[:, None], logits, 0.0), axis=1), AXIS)
        values, best = ranked(logits, ids, count, unrolled)
        if not unrolled:
            values, best = (lax.all_gather(part, AXIS, axis=1, tiled=True) for part in (values, best))
            values, best = ranked(values, jnp.where(best < 0, NONE, best), count)
        return logit - log_sum, best, values - log_sum[:, None]

    def nothing() -> tuple[jax.Array, ...]:
        rows = len(token)
        return jnp.zeros(rows), jnp.full((rows, TOP), -1, jnp.int32), jnp.full((rows, TOP), -jnp.inf)

    changed = jnp.any((fields["edited"] > 0) | (fields["masked"] > 0))
    after = lax.cond(changed, lambda: adjusted(logits, fields, edits, mask), lambda: logits)
    logprob, best, values = lax.cond(count > 0, looked_at, nothing)
    return {"logits": after, "logprob": logprob, "top_token": best, "top_logprob": values}

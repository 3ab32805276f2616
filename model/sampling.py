"""From logits to tokens, on the devices, without the host in between.

The vocabulary stays cut over devices until here. Greedy rows need the best of each device; only when a row of the call
samples are the logits gathered. The key of a row is ``fold_in(key(seed), position)``: a sample depends on its own seed
and position and not on its neighbours, the padding or TP.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ling3export.model.geometry import AXIS


def best_of_own(logits: jax.Array) -> jax.Array:
    """fp32 ``[3, R]`` of this device's ``[R, V/TP]``: the best logit, the sum of exponents below it, its token.

    The token as a number, exact up to 2^24: a bit-cast id is a denormal, which an accelerator may flush to zero.
    """
    best = jnp.max(logits, axis=1)
    index = jnp.argmax(logits, axis=1).astype(jnp.int32) + lax.axis_index(AXIS) * logits.shape[1]
    total = jnp.sum(jnp.exp(logits - best[:, None]), axis=1)
    return jnp.stack([best, total, index.astype(jnp.float32)])


def best_of_all(each: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(token ``[R]``, its logit, the logarithm of the sum of exponents below it) from ``[TP, 3, R]`` of all devices.

    Ties go to the lowest id.
    """
    bests, totals = each[:, 0], each[:, 1]
    winner = jnp.argmax(bests, axis=0)
    rows = jnp.arange(each.shape[2])
    token = each[winner, 2, rows].astype(jnp.int32)
    maximum = bests[winner, rows]
    return token, maximum, jnp.log(jnp.sum(totals * jnp.exp(bests - maximum), axis=0))


def greedy(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(token ``[R]``, its log-probability ``[R]``) from this device's ``[R, V/TP]``; ties go to the lowest id."""
    token, _, log_total = best_of_all(lax.all_gather(best_of_own(logits), AXIS))
    return token, -log_total


def keep_mask(scaled: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Which of ``[R, V]`` may be drawn: the ``top_k`` best (0 = all), and of these the fewest that hold ``top_p``."""
    vocab = scaled.shape[1]
    order = jnp.argsort(-scaled, axis=1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=1)
    rank = jnp.arange(vocab)
    limit = jnp.where(top_k > 0, top_k, vocab)[:, None]
    inside = jnp.where(rank < limit, ranked, -jnp.inf)
    probability = jax.nn.softmax(inside, axis=1)
    before = jnp.cumsum(probability, axis=1) - probability
    # A share of 1 keeps everything, though the sum of a long tail's head rounds to 1 before its end.
    kept = (rank < limit) & ((before < top_p[:, None]) | (rank == 0) | (top_p[:, None] >= 1))
    rows = jnp.arange(scaled.shape[0])[:, None]
    return jnp.zeros(scaled.shape, bool).at[rows, order].set(kept)


def draw(logits: jax.Array, fields: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Samples from this device's ``[R, V/TP]`` by temperature, top-k and top-p; every device draws the same."""
    whole = lax.all_gather(logits, AXIS, axis=1, tiled=True)
    temperature = fields["temperature"]
    scaled = whole / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    masked = jnp.where(keep_mask(scaled, fields["top_k"], fields["top_p"]), scaled, -jnp.inf)

    def gumbel(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, whole.shape[1:], jnp.float32)

    noise = jax.vmap(gumbel)(fields["seed"], fields["position"])
    token = jnp.argmax(masked + noise, axis=1).astype(jnp.int32)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(whole, axis=1), token[:, None], axis=1)[:, 0]
    return token, logprob


def sample(logits: jax.Array, fields: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Greedy where ``temperature`` is 0, drawn elsewhere.

    Args:
        logits: fp32 ``[R, V/TP]``, this device's vocabulary.
        fields: ``slot, position, temperature, top_k, top_p, seed``, each ``[R]``.

    Returns:
        ``token [R]`` int32 and its log-probability under the plain softmax, ``[R]`` fp32; the same on every device.
    """
    best = greedy(logits)

    def mixed() -> tuple[jax.Array, jax.Array]:
        drawn = draw(logits, fields)
        hot = fields["temperature"] > 0
        return jnp.where(hot, drawn[0], best[0]), jnp.where(hot, drawn[1], best[1])

    return lax.cond(jnp.any(fields["temperature"] > 0), mixed, lambda: best)

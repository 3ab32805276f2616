"""The router of one card, and the experts of more rows than choose matrices of their own.

Such rows are multiplied in batches: equally many rows of every expert. XLA:GPU multiplies a batch of matrices where
they lie. A product with all experts at once, whose contraction runs over the experts too, would write every ``down``
matrix anew: 201 MB a layer of Ling-3.0-tiny. Rows for which a batch has no room come in tiles, each with a copy of its
expert's matrices: no loop, for whose end the host would have to wait.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from ling3export.model.config import Config
from ling3export.model.layers import IN_BOUNDS

ROOM = 128  # rows of an expert that a batch computes in about the time in which it reads the expert's matrices


def rank(values: Float32[Array, "*rows N"]) -> Int32[Array, "*rows N"]:
    """How many of the last axis come before each value in descending order; of equal values the first comes first."""
    index = np.arange(values.shape[-1])
    other, own = values[..., None, :], values[..., :, None]
    before = (other > own) | ((other == own) & (index < index[:, None]))
    return jnp.sum(before, axis=-1, dtype=jnp.int32)


@jax.named_scope("router")
def route_by_rank(
    scores: Float32[Array, "T E"], bias: Float32[Array, "E"], config: Config
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"]]:
    """:func:`moe.route` without a sort, which is an operation of its own on a card; E² comparisons a token."""
    tokens, experts = scores.shape
    grouped = (scores + bias).reshape(tokens, config.n_group, -1)
    size = grouped.shape[-1]
    pairs = np.tri(size, k=-1, dtype=bool) if size > 1 else np.ones((1, 1), bool)
    sums = grouped[..., :, None] + (grouped[..., None, :] if size > 1 else 0.0)
    group = jnp.max(jnp.where(pairs, sums, -jnp.inf), axis=(-1, -2))
    is_open = rank(group) < config.topk_group
    place = rank(jnp.where(is_open[:, :, None], grouped, -jnp.inf).reshape(tokens, experts))
    at = place[:, None] == np.arange(config.num_experts_per_tok)[:, None]  # [T, A, E]
    number = np.arange(experts, dtype=np.int32)
    chosen = jnp.minimum(jnp.sum(jnp.where(at, number, 0), axis=-1, dtype=jnp.int32), experts - 1)  # of NaN: any
    weights = jnp.sum(jnp.where(at, scores[:, None], 0.0), axis=-1)
    return chosen, weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20) * config.routed_scaling_factor


def batch_rows(tokens: int, choices: int, experts: int) -> int:
    """Rows of each expert in a batch: ``ROOM``, or a power of two with room for one and a half times the mean rows."""
    size = ROOM
    while size < 1.5 * tokens * choices / experts:
        size *= 2
    return min(size, tokens)


def tile_count(tokens: int, choices: int, experts: int) -> int:
    """The most tiles that any router needs.

    An expert with k tiles, at most ``most``, has k times ``batch_rows`` other rows and one more: K tiles of all experts
    come with ``K * size + K / most`` rows or more, of the ``tokens * choices`` that there are.
    """
    size = batch_rows(tokens, choices, experts)
    most = -(-tokens // size) - 1
    return min(tokens * choices * most // (size * most + 1), experts * most)


def weighted_sum(
    x: Float[Array, "T D"],
    chosen: Int32[Array, "T A"],
    share: Float32[Array, "T A"],
    experts: int,
    multiply: Callable[[Float[Array, "N C D"], Callable[[Array], Array]], Float32[Array, "N C D"]],
) -> Float32[Array, "T D"]:
    """The results of each row's chosen experts, added up with the weights ``share``.

    ``chosen`` is ``experts`` where a row takes no expert. ``multiply`` computes C rows of each of N experts; its second
    argument picks theirs from an array of all experts.
    """
    tokens, choices = chosen.shape
    size, count = batch_rows(tokens, choices, experts), tile_count(tokens, choices, experts)
    takes = chosen[:, :, None] == jnp.arange(experts)  # [T, A, E]
    one = jnp.any(takes, axis=1).astype(jnp.bfloat16)
    # How many rows before each take the same expert, by a product of zeros and ones, which is exact.
    before = jnp.tri(tokens, k=-1, dtype=jnp.bfloat16)
    place = jnp.matmul(before, one, preferred_element_type=jnp.float32)  # [T, E]
    place = jnp.sum(jnp.where(takes, place[:, None], 0.0), axis=-1).astype(jnp.int32)
    token = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], chosen.shape)
    real = chosen < experts

    def added(inside: Array, place: Array, count: int, own: Callable[[Array], Array]) -> Array:
        """The results of the choices ``inside``, each at ``place`` of ``count`` times ``size`` rows."""
        place = jnp.where(inside, place, count * size)
        # Rows that no choice fills repeat token 0 and are never read.
        rows = jnp.zeros((count * size + 1,), jnp.int32).at[place].set(token)[:-1]
        done = multiply(x.at[rows].get(mode=IN_BOUNDS).reshape(count, size, -1), own).reshape(count * size, -1)
        result = done.at[jnp.where(inside, place, 0)].get(mode=IN_BOUNDS)  # [T, A, D]
        return jnp.sum(jnp.where(inside[..., None], result * share[..., None], 0.0), axis=1)

    total = added(real & (place < size), chosen * size + place, experts, lambda leaf: leaf)
    if not count:
        return total
    with jax.named_scope("tiles"):
        rows = jnp.sum(one, axis=0, dtype=jnp.float32).astype(jnp.int32)  # [E]
        own = jnp.maximum(-(-rows // size) - 1, 0)
        end = jnp.sum(jnp.where(np.tri(experts, dtype=bool), own, 0), axis=-1, dtype=jnp.int32)
        expert = jnp.minimum(jnp.sum(end <= jnp.arange(count)[:, None], axis=-1, dtype=jnp.int32), experts - 1)
        tile = place + size * (jnp.sum(jnp.where(takes, end - own, 0), axis=-1) - 1)
        more = added(real & (place >= size), tile, count, lambda leaf: leaf.at[expert].get(mode=IN_BOUNDS))
    return total + more

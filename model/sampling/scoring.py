"""Log-probabilities of given next tokens, without the logits of all padded tokens at a time.

Logits are computed for some rows after the other. A device keeps four numbers of each row: its best logit, the sum of
``exp(logit - best)``, which token that is, and the logit of the next token where this device has it. One gather takes
them to all devices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from ling3export.model.geometry import AXIS, CHUNK
from ling3export.model.sampling.sample import best_of_all, best_of_own

# Padded tokens whose logits exist at a time: 5 MB for a sixteenth of Ling3-Tiny's vocabulary, 80 MB for the whole.
ROWS = 128


def score(
    logits: Callable[[jax.Array], jax.Array], x: Float32[Array, "T D"], next_token: Int32[Array, "T"]
) -> tuple[Float32[Array, "T"], Int32[Array, "T"]]:
    """Scores ``next_token`` behind every padded token.

    Args:
        logits: From ``[R, D]`` to fp32 ``[R, V/TP]``, this device's part of the vocabulary.
        x: What the last layer gave; T is a multiple of CHUNK.
        next_token: -1 where there is none to score.

    Returns:
        The log-probability under the plain softmax, 0 where there is no next token; and the token with the largest
        logit (of equals the lowest id), -1 where there is no next token. The same on every device.
    """
    slots = x.shape[0]
    size = max(size for size in range(CHUNK, min(slots, ROWS) + 1, CHUNK) if slots % size == 0)

    def rows(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        own = logits(part[0])
        index = part[1] - lax.axis_index(AXIS) * own.shape[1]
        inside = (index >= 0) & (index < own.shape[1])
        scored = jnp.take_along_axis(own, jnp.where(inside, index, 0)[:, None], axis=1)[:, 0]
        return jnp.concatenate([best_of_own(own), jnp.where(inside, scored, 0.0)[None]])

    parts = lax.map(rows, (x.reshape(-1, size, x.shape[1]), next_token.reshape(-1, size)))
    each = jnp.moveaxis(lax.all_gather(parts, AXIS), 2, 1).reshape(-1, 4, slots)
    best, maximum, log_total = best_of_all(each[:, :3])
    given = next_token >= 0
    logprob = jnp.sum(each[:, 3], axis=0) - maximum - log_total
    return jnp.where(given, logprob, 0.0), jnp.where(given, best, -1)

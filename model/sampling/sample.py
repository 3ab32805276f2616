"""From logits to tokens, and to log-probabilities of given tokens, on the devices, without the host in between.

The vocabulary stays cut over devices until here. Greedy rows need the best of each device. Only when a row of the call
samples are the logits exchanged, so that each device has its share of the rows, whole. The key of a row is
``fold_in(key(seed), position)``: a sample depends on its own seed and position and not on its neighbours, the padding
or TP.

Axis letters: R rows, V vocabulary, v = V/TP this device's part of it; L and W as in ``thresholds.py``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from ling3export.model.geometry import AXIS, CHUNK, Geometry
from ling3export.model.native import calls
from ling3export.model.sampling.thresholds import by_row, keep_mask, numbers, to_lines

# Padded tokens whose logits exist at a time: 5 MB for a sixteenth of Ling3-Tiny's vocabulary, 80 MB for the whole.
ROWS = 128
# Constants of the generator Threefry-2x32.
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
Words = UInt32[Array, "..."]
NO_TOKEN = -1  # in place of a token where a row's logits are not usable: the runner fails that request by name


def first_best(lines: Float32[Array, "L W"], rows: int) -> tuple[Float32[Array, "R"], Int32[Array, "R"]]:
    """(the largest value of each row, the lowest number of one that large), from lines as in ``thresholds.py``.

    Two reductions and no ``argmax``: XLA:TPU may round what an ``argmax`` compares.
    """
    best = by_row(jnp.max, lines, rows)
    equal = lines == to_lines(best, len(lines))
    return best, by_row(jnp.min, jnp.where(equal, numbers(lines.shape, rows), jnp.iinfo(jnp.int32).max), rows)


def best_of_own(logits: Float32[Array, "R v"], geometry: Geometry | None = None) -> Float32[Array, "3 R"]:
    """Three rows about this device's vocabulary: the best logit, the sum of ``exp(logit - best)``, the best's token.

    The token is written as a number, which is exact up to 2^24: a bit-cast id is a denormal, which an accelerator may
    flush to zero. Where all logits of this device are -inf the sum is 0, and NaN where one is NaN or inf. A
    ``geometry`` with native kernels has one that reads the logits once.
    """
    first = lax.axis_index(AXIS) * logits.shape[1]
    if geometry is not None and geometry.kernels:
        return calls.best(logits, first, geometry)
    best, index = first_best(logits, len(logits))
    index += first
    finite = jnp.maximum(best, jnp.finfo(jnp.float32).min)  # -inf less -inf would be NaN
    return jnp.stack([best, jnp.sum(jnp.exp(logits - finite[:, None]), axis=1), index.astype(jnp.float32)])


def best_of_all(parts: Float32[Array, "TP 3 R"]) -> tuple[Int32[Array, "R"], Float32[Array, "R"], Float32[Array, "R"]]:
    """(token, its logit, the logarithm of the sum of ``exp(logit - best)``) from :func:`best_of_own` of all devices.

    Ties go to the lowest id. The token is NO_TOKEN where a logit is NaN or inf, or none is above -inf.
    """
    bests, totals, tokens = parts[:, 0], parts[:, 1], parts[:, 2]
    maximum = jnp.max(bests, axis=0)
    token = jnp.min(jnp.where(bests == maximum, tokens, jnp.inf), axis=0)
    log_total = jnp.log(jnp.sum(totals * jnp.exp(bests - maximum), axis=0))
    usable = jnp.isfinite(maximum + log_total)  # the sum sees every logit, whatever a machine's maximum makes of a NaN
    return jnp.where(usable, token.astype(jnp.int32), NO_TOKEN), maximum, log_total


def greedy(
    logits: Float32[Array, "R v"], geometry: Geometry | None = None
) -> tuple[Int32[Array, "R"], Float32[Array, "R"], Float32[Array, "R"]]:
    """(token, its logit, the logarithm of the sum of all ``exp(logit)``), from this device's part of the vocabulary.

    The token is that of :func:`best_of_all`.
    """
    token, maximum, log_total = best_of_all(lax.all_gather(best_of_own(logits, geometry), AXIS))
    return token, maximum, maximum + log_total


def threefry(key: tuple[Words, Words], count: tuple[Words, Words]) -> tuple[Words, Words]:
    """Two words of random bits for each key and count: 20 rounds of Threefry-2x32, as in ``jax.random``.

    Salmon and others, "Parallel random numbers: as easy as 1, 2, 3", 2011. For processors jax makes a loop of the
    rounds, which copies two arrays of bits in each trip: 2.6 times as long for 32 rows of the vocabulary.
    """
    keys = (*key, key[0] ^ key[1] ^ PARITY)
    first, second = count[0] + keys[0], count[1] + keys[1]
    for group in range(5):
        for bits in ROTATIONS[group % 2]:
            first = first + second
            second = first ^ (second << np.uint32(bits) | second >> np.uint32(32 - bits))
        first = first + keys[(group + 1) % 3]
        second = second + keys[(group + 2) % 3] + np.uint32(group + 1)
    return first, second


def gumbel(seed: Int32[Array, "R"], position: Int32[Array, "R"], devices: int, width: int) -> Float32[Array, "d R v"]:
    """Noise for each token of each row, ``width`` tokens of each device; the same however the vocabulary is cut.

    Bit for bit the numbers of ``jax.random.gumbel(fold_in(key(seed), position), (devices, width))`` under jit.
    """
    zero = jnp.zeros_like(seed, jnp.uint32)
    first, second = threefry((zero, seed.astype(jnp.uint32)), (zero, position.astype(jnp.uint32)))
    number = lax.broadcasted_iota(jnp.uint32, (devices, 1, width), 0) * np.uint32(width)
    number += lax.broadcasted_iota(jnp.uint32, (devices, 1, width), 2)
    words = threefry((first[:, None], second[:, None]), (jnp.zeros_like(number), number))
    mantissa = (words[0] ^ words[1]) >> np.uint32(9) | np.uint32(0x3F800000)
    tiny = jnp.finfo(jnp.float32).tiny
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - np.float32(1)
    return -jnp.log(-jnp.log(jnp.maximum(tiny, uniform * (np.float32(1) - tiny) + tiny)))


def draw(
    logits: Float32[Array, "R v"], fields: dict[str, jax.Array], unrolled: bool = False
) -> tuple[Int32[Array, "R"], Float32[Array, "R"]]:
    """Samples by temperature, min-p, top-k and top-p, in vLLM's order: top-p is a share of the tokens that the others
    leave.

    Args:
        logits: This device's part of the vocabulary.
        fields: See :func:`sample`.

    Returns:
        (token, its logit), the same on every device.
    """
    rows, width = logits.shape
    devices = lax.axis_size(AXIS)
    more = -rows % devices

    def own(values: jax.Array) -> jax.Array:
        """This device's share of the rows."""
        share = (rows + more) // devices
        return lax.dynamic_slice_in_dim(jnp.pad(values, (0, more)), lax.axis_index(AXIS) * share, share)

    cut = jnp.pad(logits, ((0, more), (0, 0)))
    # This device's rows, part by part. Alone it has them all, and a program without collectives can have no exchange.
    lines = cut if devices == 1 else lax.all_to_all(cut, AXIS, split_axis=0, concat_axis=0, tiled=True)
    temperature, top_k, top_p, min_p, seed, position = (
        own(fields[name]) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    )
    # The best value is subtracted first: then no temperature makes it infinite or leaves the noise without digits.
    # Rows of temperature 0 are greedy, and a device may take a denormal for 0: neither may divide zero by zero.
    below = lines - to_lines(by_row(jnp.max, lines, len(seed)), len(lines))
    scaled = below / to_lines(jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny), len(lines))
    # The best one is 0 now, so this keeps probabilities of at least min_p times the best one's; 0 keeps all.
    scaled = jnp.where(scaled >= to_lines(jnp.log(min_p), len(lines)), scaled, -jnp.inf)

    noise = gumbel(seed, position, devices, width).reshape(lines.shape)
    noisy = jnp.where(keep_mask(scaled, top_k, top_p, unrolled), scaled + noise, -jnp.inf)
    token = first_best(noisy, len(seed))[1]
    chosen = numbers(lines.shape, len(seed)) == to_lines(token, len(lines))
    logit = by_row(jnp.sum, jnp.where(chosen, lines, 0.0), len(seed))
    drawn = lax.all_gather(jnp.stack([token.astype(jnp.float32), logit]), AXIS, axis=1, tiled=True)[:, :rows]
    return drawn[0].astype(jnp.int32), drawn[1]


@jax.named_scope("sample")
def sample(
    logits: Float32[Array, "R v"], fields: dict[str, jax.Array], geometry: Geometry | None = None
) -> tuple[Int32[Array, "R"], Float32[Array, "R"]]:
    """Greedy where ``temperature`` is 0, drawn elsewhere.

    Args:
        logits: This device's part of the vocabulary.
        fields: ``slot, position, temperature, top_k, top_p, min_p, seed``, each ``[R]``.
        geometry: Its form is that of the program. Where it is ``unrolled`` (see :func:`keep_mask`), whether a row is
            drawn at all stays a condition.

    Returns:
        The token and its log-probability under the plain softmax, the same on every device. NO_TOKEN where a logit is
        NaN or inf, or none is above -inf.
    """
    token, logit, log_sum = greedy(logits, geometry)
    do_sample = (fields["temperature"] > 0) & (token != NO_TOKEN)

    def mixed() -> tuple[jax.Array, jax.Array]:
        drawn = draw(logits, fields, geometry is not None and geometry.unrolled)
        return jnp.where(do_sample, drawn[0], token), jnp.where(do_sample, drawn[1], logit)

    with jax.named_scope("drawn"):
        token, logit = lax.cond(jnp.any(do_sample), mixed, lambda: (token, logit))
    return token, logit - log_sum


@jax.named_scope("sample")
def score_next(
    logits: Callable[[jax.Array], jax.Array],
    x: Float32[Array, "T D"],
    next_token: Int32[Array, "T"],
    geometry: Geometry | None = None,
) -> tuple[Float32[Array, "T"], Int32[Array, "T"], Float32[Array, "T"]]:
    """Scores ``next_token`` after every padded token, without the logits of all of them at a time.

    Logits are computed for some rows after the other. A device keeps four numbers of each row, those of
    :func:`best_of_own` and the logit of the next token where this device has it. One gather takes them to all devices.

    Args:
        logits: From ``[R, D]`` to fp32 ``[R, V/TP]``, this device's part of the vocabulary.
        x: The last layer's output; T is a multiple of CHUNK.
        next_token: -1 where there is none to score.
        geometry: It decides the program's form.

    Returns:
        The log-probability under the plain softmax, not finite where a row's logits are not usable; the token with the
        largest logit (of equals the lowest id); and the log-probability of that one. They are 0, -1 and 0 where there
        is no next token, and the same on every device.
    """
    slots = x.shape[0]
    size = max(size for size in range(CHUNK, min(slots, ROWS) + 1, CHUNK) if slots % size == 0)

    def rows(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        own = logits(part[0])
        index = part[1] - lax.axis_index(AXIS) * own.shape[1]
        inside = (index >= 0) & (index < own.shape[1])
        scored = jnp.take_along_axis(own, jnp.where(inside, index, 0)[:, None], axis=1)[:, 0]
        return jnp.concatenate([best_of_own(own, geometry), jnp.where(inside, scored, 0.0)[None]])

    parts = lax.map(rows, (x.reshape(-1, size, x.shape[1]), next_token.reshape(-1, size)))
    parts = jnp.moveaxis(lax.all_gather(parts, AXIS), 2, 1).reshape(-1, 4, slots)
    best, maximum, log_total = best_of_all(parts[:, :3])
    scored = next_token >= 0
    logprob = jnp.sum(parts[:, 3], axis=0) - maximum - log_total
    return jnp.where(scored, logprob, 0.0), jnp.where(scored, best, -1), jnp.where(scored, -log_total, 0.0)

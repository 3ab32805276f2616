"""llama.cpp's Q8_0, Q4_0, Q4_K and Q6_K in numpy, written from its published definitions (ggml-quants.c).

``python -m tests.support.gguf_forms CHECKPOINT TEXT`` compares the plain model in float64 with weights rounded to these
forms and to this project's forms. A scale is stored in fp16; products are computed in fp32. ``Q4_K_M`` mixes Q4_K and
Q6_K by the rules of ``llama-quantize``.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ling3export.checkpoint.convert import WeightSource
from ling3export.checkpoint.reader import Checkpoint
from ling3export.runners.evals.compare_logits import LogitsComparison, judge, summed
from ling3export.verify.dequantized import Dequantized
from ling3export.verify.reference import Reference

Array = NDArray[np.float32]
KEPT = (".gate.weight", "conv1d.weight")
WINDOW = 512


def _half(scale: Array) -> Array:
    """Rounds a scale to fp16."""
    return scale.astype(np.float16).astype(np.float32)


def _inverse(scale: Array) -> Array:
    """1 / scale, and 0 for 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _away(x: Array) -> Array:
    """C's ``roundf``: the nearest integer, halves away from zero."""
    return np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x)


def q8_0(x: Array) -> Array:
    """Blocks [B, 32]: d = amax / 127, q from -127 to 127."""
    d = np.max(np.abs(x), axis=1, keepdims=True) / np.float32(127)
    return _away(x * _inverse(d)) * _half(d)


def q4_0(x: Array) -> Array:
    """Blocks [B, 32]: d = m / -8, where m is the value with the largest magnitude; q from -8 to 7."""
    largest = np.take_along_axis(x, np.argmax(np.abs(x), axis=1)[:, None], axis=1)
    d = largest / np.float32(-8)
    q = np.minimum(np.trunc(x * _inverse(d) + np.float32(8.5)), 15)
    return (q - 8) * _half(d)


def _total(x: Array) -> Array:
    return np.sum(x, axis=1, keepdims=True)


def _scales_and_least(x: Array) -> tuple[Array, Array]:
    """A scale and a minimum of each block [B, 32], such that ``x`` is near ``scale * q - minimum`` with q from 0 to 15.

    It tries 22 scales and fits each by least squares, weighted by the block's root mean square plus the magnitude of x.
    """
    weight = np.sqrt(np.mean(x * x, axis=1, keepdims=True)) + np.abs(x)
    least = np.minimum(np.min(x, axis=1, keepdims=True), 0)
    spread = np.max(x, axis=1, keepdims=True) - least
    some = np.where(spread > 0, spread, 1)
    sum_w, sum_x = _total(weight), _total(weight * x)
    q = np.clip(np.rint(15 / some * (x - least)), 0, 15)
    scale, offset = some / 15, least
    best = _total(weight * (scale * q + offset - x) ** 2)
    for step in range(21):
        q = np.clip(np.rint((14 + 0.1 * step) / some * (x - least)), 0, 15).astype(np.float32)
        sum_q, sum_q2, sum_xq = _total(weight * q), _total(weight * q * q), _total(weight * x * q)
        determinant = sum_w * sum_q2 - sum_q * sum_q
        safe = np.where(determinant > 0, determinant, 1)
        own, low = (sum_w * sum_xq - sum_x * sum_q) / safe, (sum_q2 * sum_x - sum_q * sum_xq) / safe
        own = np.where(low > 0, sum_xq / np.where(sum_q2 > 0, sum_q2, 1), own)
        low = np.minimum(low, 0)
        error = _total(weight * (own * q + low - x) ** 2)
        better = (determinant > 0) & (error < best)
        scale, offset, best = np.where(better, own, scale), np.where(better, low, offset), np.where(better, error, best)
    return np.where(spread > 0, scale, 0), -offset


def q4_k(x: Array) -> Array:
    """Blocks [B, 256]: eight parts of 32, each with a scale and a minimum of six bits."""
    parts = x.reshape(-1, 32)
    scales, least = (each.reshape(-1, 8) for each in _scales_and_least(parts))
    d, dmin = (np.max(each, axis=1, keepdims=True) / np.float32(63) for each in (scales, least))
    scale = (_half(d) * np.minimum(np.rint(scales * _inverse(d)), 63)).reshape(-1, 1)
    offset = (_half(dmin) * np.minimum(np.rint(least * _inverse(dmin)), 63)).reshape(-1, 1)
    q = np.clip(np.rint((parts + offset) * _inverse(scale)), 0, 15)
    return (scale * q - offset).reshape(x.shape)


def q6_k(x: Array) -> Array:
    """Blocks [B, 256]: sixteen parts of 16, each with a scale of eight bits; q from -32 to 31, and d for the block.

    For each part, it tries 19 scales and takes the one with the least squared error, weighted by the squares of the
    values.
    """
    parts = x.reshape(-1, 16)
    extreme = np.take_along_axis(parts, np.argmax(np.abs(parts), axis=1)[:, None], axis=1)
    weight, scales, best = parts * parts, np.zeros_like(extreme), np.zeros_like(extreme)
    for step in (0, *range(-9, 0), *range(1, 10)):
        q = np.clip(np.rint(-(32 + np.float32(0.1) * step) * _inverse(extreme) * parts), -32, 31)
        sum_xq, sum_q2 = _total(weight * parts * q), _total(weight * q * q)
        better = (sum_q2 > 0) & ((sum_xq * sum_xq > best * sum_q2) | (step == 0))
        own = sum_xq / np.where(sum_q2 > 0, sum_q2, 1)
        scales, best = np.where(better, own, scales), np.where(better, own * sum_xq, best)
    scales = scales.reshape(-1, 16)
    largest = np.take_along_axis(scales, np.argmax(np.abs(scales), axis=1)[:, None], axis=1)
    d = largest / np.float32(-128)
    scale = (_half(d) * np.minimum(np.rint(scales * _inverse(d)), 127)).reshape(-1, 1)
    return (scale * np.clip(np.rint(parts * _inverse(scale)), -32, 31)).reshape(x.shape)


FORMS: dict[str, tuple[int, Callable[[Array], Array]]] = {
    "Q8_0": (32, q8_0),
    "Q4_0": (32, q4_0),
    "Q4_K": (256, q4_k),
    "Q6_K": (256, q6_k),
}
MIXES = ("Q4_0", "Q4_K_M")  # files that mix several forms
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.")


def form_in(mix: str, name: str, layers: int) -> str:
    """Form of a matrix in a file of ``mix``, by the matrix's published name.

    The output head has six bits in a file of four bits. In Q4_K_M, so do the value and down projections of the first
    and the last eighth of the layers, and of every third layer between them.
    """
    if mix not in MIXES:
        return mix
    if name == "lm_head.weight":
        return "Q6_K"
    if mix == "Q4_0":
        return mix
    match = _LAYER.match(name)
    if match is None or not name.endswith(("attention.v_proj.weight", "down_proj.weight")):
        return "Q4_K"
    layer, eighth = int(match[1]), layers // 8
    more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    return "Q6_K" if more else "Q4_K"


def rounded(values: NDArray[np.generic], form: str) -> Array:
    """Rounds values ``[..., in]`` of any float dtype to a form and back.

    ``in`` must be a multiple of 32. A block of 256 may continue in the next row, so that small models can use these
    forms; llama.cpp uses another form for such rows.
    """
    size, through = FORMS[form]
    flat = values.astype(np.float32).reshape(-1)
    blocks = np.pad(flat, (0, -len(flat) % size)).reshape(-1, size)
    return through(blocks).reshape(-1)[: len(flat)].reshape(values.shape)


class Rounded:
    """A checkpoint whose matrices are rounded to a form, in fp32; ``Dequantized`` does this for the project's own
    forms.

    The router, the convolutions, and matrices whose rows are not a multiple of 32 are not rounded.
    """

    def __init__(self, source: WeightSource, form: str) -> None:
        self.config = source.config
        self._source, self._form = source, form

    def tensor(self, name: str) -> NDArray[np.generic]:
        """Reads a tensor by its published name."""
        values = self._source.tensor(name)
        if values.ndim != 2 or not name.endswith(".weight") or name.endswith(KEPT) or values.shape[1] % 32:
            return values
        return rounded(values, form_in(self._form, name, self.config.num_hidden_layers))


def compared(checkpoint: Checkpoint, ids: Sequence[int], forms: Sequence[str]) -> Iterator[LogitsComparison]:
    """Error of each form against the plain model in float64, over the later half of windows of 512 tokens."""
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW // 2)]
    places = [range(WINDOW // 2 - 1, WINDOW - 1)] * len(windows)

    def logits(source: WeightSource | Rounded | Dequantized) -> list[NDArray[np.float64]]:
        return Reference(checkpoint.config, source.tensor).logits_many(windows, places)

    plain = logits(checkpoint)
    for form in forms:
        found = logits(Rounded(checkpoint, form) if form.startswith("Q") else Dequantized(checkpoint, form))
        yield summed(
            [
                judge(a, b, window[WINDOW // 2 + place])
                for window, first, second in zip(windows, plain, found, strict=True)
                for place, (a, b) in enumerate(zip(first, second, strict=True))
            ],
            WINDOW,
        )


if __name__ == "__main__":
    checkpoint = Checkpoint.open(Path(sys.argv[1]))
    text = Path(sys.argv[2]).read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(checkpoint.path / "tokenizer.json")).encode(text).ids[: 256 + 4096]
    forms = ("int8", "Q8_0", "int4", "int4-small", "Q4_0", "Q4_K_M")
    for form, found in zip(forms, compared(checkpoint, ids, forms), strict=True):
        print(
            f"{form:10} KL {found.kl_mean:.6f} ± {found.kl_error:.6f}, 99 %: {found.kl_p99:.5f}, "
            f"same best {found.same_best:.4f}, perplexity {found.perplexity_ratio:.5f}",
            flush=True,
        )

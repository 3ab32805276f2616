"""llama.cpp's Q8_0 and Q4_0 in numpy, by the definitions that it publishes (ggml-quants.c, quantize_row_*_ref).

``python -m tests.support.gguf_forms CHECKPOINT TEXT`` says what they do to the plain model in float64, beside this
project's forms. A scale is stored in fp16; products are taken in fp32.
"""

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
    """As fp16 keeps it."""
    return scale.astype(np.float16).astype(np.float32)


def _inverse(scale: Array) -> Array:
    """1 / scale, and 0 for 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _away(x: Array) -> Array:
    """C's ``roundf``: the nearest whole number, halves away from zero."""
    return np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x)


def q8_0(x: Array) -> Array:
    """Blocks [B, 32]: d = amax / 127, q from -127 to 127."""
    d = np.max(np.abs(x), axis=1, keepdims=True) / np.float32(127)
    return _away(x * _inverse(d)) * _half(d)


def q4_0(x: Array) -> Array:
    """Blocks [B, 32]: d = m / -8 for the value m of the largest magnitude, q from -8 to 7."""
    largest = np.take_along_axis(x, np.argmax(np.abs(x), axis=1)[:, None], axis=1)
    d = largest / np.float32(-8)
    q = np.minimum(np.trunc(x * _inverse(d) + np.float32(8.5)), 15)
    return (q - 8) * _half(d)


FORMS: dict[str, tuple[int, Callable[[Array], Array]]] = {"Q8_0": (32, q8_0), "Q4_0": (32, q4_0)}


def rounded(values: NDArray[np.generic], form: str) -> Array:
    """What is left of values [..., in] of any float dtype; ``in`` is a whole number of blocks."""
    size, through = FORMS[form]
    return through(values.astype(np.float32).reshape(-1, size)).reshape(values.shape)


class Rounded:
    """A checkpoint of which matrices are read as a form keeps them, in fp32, as ``Dequantized`` is for this project's.

    The router, convolutions, and matrices whose rows are no whole number of blocks stay as they are.
    """

    def __init__(self, source: WeightSource, form: str) -> None:
        self.config = source.config
        self._source, self._form = source, form

    def tensor(self, name: str) -> NDArray[np.generic]:
        """A tensor by its published name."""
        values = self._source.tensor(name)
        matrix = values.ndim == 2 and name.endswith(".weight") and not name.endswith(KEPT)
        return rounded(values, self._form) if matrix and values.shape[1] % FORMS[self._form][0] == 0 else values


def compared(checkpoint: Checkpoint, ids: Sequence[int], forms: Sequence[str]) -> Iterator[LogitsComparison]:
    """What each form does to the plain model in float64, on windows of 512 tokens of which the later half is judged."""
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW + 1, WINDOW // 2)]
    places = [range(WINDOW // 2 - 1, WINDOW - 1)] * len(windows)

    def logits(source: WeightSource | Rounded | Dequantized) -> list[NDArray[np.float64]]:
        return Reference(checkpoint.config, source.tensor).logits_many(windows, places)

    plain = logits(checkpoint)
    for form in forms:
        found = logits(Rounded(checkpoint, form) if form in FORMS else Dequantized(checkpoint, form))
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
    forms = ("int8", "Q8_0", "int4", "Q4_0")
    for form, found in zip(forms, compared(checkpoint, ids, forms), strict=True):
        print(
            f"{form:5} KL {found.kl_mean:.6f} ± {found.kl_error:.6f}, 99 %: {found.kl_p99:.5f}, "
            f"same best {found.same_best:.4f}, perplexity {found.perplexity_ratio:.5f}",
            flush=True,
        )

"""Vectors: token sequences and the logits that the plain model gives for them, stored with the artifact.

The logits come from ``reference.py`` (numpy, token by token, unpaged, one device), never from the programs that they
judge.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from ling3export.artifacts.files import write_new
from ling3export.artifacts.manifest import file_record
from ling3export.artifacts.parameters import PLAIN
from ling3export.artifacts.schema import MarginsRecord, SequenceRecord, Vectors
from ling3export.checkpoint.convert import Progress, WeightSource
from ling3export.foundation.errors import CheckpointError
from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK
from ling3export.verify.dequantized import Dequantized, exact_type
from ling3export.verify.reference import Reference

SMALLEST_MARGIN = 5e-6  # a routing decision closer than this flips under any rounding
TRIES = 8
PATH = "vectors/expected.safetensors"


def sequences(config: Config, context: int, seed: int) -> tuple[SequenceRecord, ...]:
    """Seeded random sequences: one that crosses a chunk, one shorter than a chunk, one of several chunks.

    Logits are stored at the end of every chunk of a prompt, at its last token, and at all decoded tokens, which are
    given (teacher forcing).
    """
    rng = np.random.default_rng(seed)
    chosen: list[SequenceRecord] = []
    for prefilled, decoded in ((17, 7), (3, 5), (50, 2)):
        total = min(prefilled + decoded, context)
        ids = tuple(int(token) for token in rng.integers(0, config.vocab_size, total))
        prompt = max(1, min(prefilled, total - 1))
        positions = sorted({*range(CHUNK - 1, prompt, CHUNK), *range(prompt - 1, total)})
        chosen.append(SequenceRecord(ids, prompt, tuple(positions), f"logits.{len(chosen)}"))
    return tuple(chosen)


def write_vectors(
    source: WeightSource, folder: Path, context: int, dtype: str, report: Progress, weights: str = PLAIN
) -> Vectors:
    """Computes and writes the vectors; returns what the manifest says of them.

    An fp32 artifact is compared to 1e-5, so its sequences are chosen by seed until no routing decision is closer than
    5e-6; the smallest margins found are recorded.

    Args:
        context: Tokens of the longest sequence.
        dtype: The artifact's dtype.
        weights: The forms of the artifact's weights: the plain model computes with what quantized ones stand for.

    Raises:
        CheckpointError: The plain model's logits are not finite.
        ArtifactError: The disk is full.
    """
    report.start("vectors", 1)
    quantized = weights != PLAIN
    read = Dequantized(source, weights).tensor if quantized else source.tensor
    reference = Reference(source.config, read, exact_type(dtype, weights))
    for seed in range(TRIES):
        chosen = sequences(source.config, context, seed)
        logits = reference.logits_many([s.ids for s in chosen], [s.positions for s in chosen])
        margins = reference.margins
        if dtype != "float32" or min(margins.expert, margins.group) >= SMALLEST_MARGIN:
            break
    if bad := [i for i, values in enumerate(logits) if not np.isfinite(values).all()]:
        raise CheckpointError(
            f"vectors: expected finite logits of the plain model, found NaN or infinity in sequence {bad[0]}",
            "some weight of the checkpoint is not finite, or far too large",
        )
    report.advance("vectors", 1)
    text = f"on dequantized {weights} weights" * quantized
    return put_vectors(folder, chosen, logits, reference, seed, text)


def put_vectors(
    folder: Path,
    chosen: tuple[SequenceRecord, ...],
    logits: Sequence[np.ndarray],
    reference: Reference,
    seed: int,
    text: str = "",
) -> Vectors:
    """Writes the logits of sequences.

    Args:
        logits: Logits of each, fp32 or more [positions, V].
        reference: The program that computed them, last.
        text: Further words of the manifest on the source.
    """
    path = folder / PATH
    path.parent.mkdir(exist_ok=True)
    data = save({s.logits: np.ascontiguousarray(v, np.float32) for s, v in zip(chosen, logits, strict=True)})
    write_new(path, data)
    margins = reference.margins
    return Vectors(
        source=f"plain numpy model, {reference.dtype.name}, token by token, unpaged, one device"
        + f", {text}" * bool(text),
        seed=seed,
        margins=MarginsRecord(_finite(margins.expert), _finite(margins.group)),
        sequences=chosen,
        expected=file_record(folder, PATH),
    )


def _finite(value: float) -> float | None:
    """JSON has no infinity: a model without a choice to make has no margin."""
    return float(value) if np.isfinite(value) else None

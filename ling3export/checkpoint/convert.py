"""Checkpoint to store: cuts every tensor of the published layout into TP shards, as the parameter table says.

A piece is a view of the mapped checkpoint, written to its place in the store. Only pieces that change order or dtype,
or are quantized, pass through memory, one at a time.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from ling3export.artifacts import schema
from ling3export.artifacts.parameters import FORMS, PLAIN, Tensor
from ling3export.artifacts.store import StoreWriter
from ling3export.checkpoint.quantize import Pair, of_parts, packed, quantize
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import CheckpointError
from ling3export.model.config import Config
from ling3export.model.parameters import EXPERT, Weight, weight_table

WORKERS = 2  # hashing and copying both release the interpreter lock

Read = Callable[[str], np.ndarray]
Stored = Callable[[str], Pair | None]
Piece = tuple[int | None, tuple[np.ndarray, ...]]


class WeightSource(Protocol):
    """The weights of a model by their published names, in torch's order."""

    @property
    def config(self) -> Config:
        """The model."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """A whole tensor; raises a Ling3Error if there is none of that name."""
        ...

    def stored(self, name: str) -> Pair | None:
        """q and scale of a tensor that is int4 in the checkpoint; None of any other."""
        ...


class Progress(Protocol):
    """Receives lines for the user, and the progress of long work: stages of ``total`` units."""

    def note(self, text: str) -> None: ...

    def start(self, stage: str, total: int) -> None: ...

    def advance(self, stage: str, amount: int) -> None: ...


def no_pair(_: str) -> Pair | None:
    """The ``stored`` of a checkpoint without int4."""
    return None


def _parts(row: Weight, at: str, read: Read, stored: Stored) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
    """(group, part) of one layer, as :class:`parameters.Source` describes them; parts are views, or q and scale."""
    source = row.source
    if source.by_expert:
        for group in range(source.groups):
            for name in source.names:
                tensor = at + name.replace(EXPERT, str(group))
                yield group, (read(tensor),) if row.form == PLAIN else _cut(row, pair_of(row, tensor, read, stored))
        return
    values = [read(at + name) for name in source.names]
    width = values[0].shape[1 if source.columns else 0] // source.groups
    start, stop = source.rows or (0, width)
    if source.columns and row.form != PLAIN:  # whole, since a TP shard may end within a group of inputs
        pair = quantize(values[0], row.form, row.group)
        for group in range(source.groups):
            yield group, _cut(row, pair, group * width, (group + 1) * width)
        return
    for group in range(source.groups):
        for value in values:
            if source.columns:
                yield group, (value[:, group * width : (group + 1) * width].T,)
            else:
                part = value[group * width + start : group * width + stop]
                yield group, (part,) if row.form == PLAIN else _cut(row, quantize(part, row.form, row.group))


def pair_of(row: Weight, tensor: str, read: Read, stored: Stored) -> Pair:
    """A checkpoint tensor of a quantized parameter: taken as it is if both are int4, else rounded."""
    pair = stored(tensor) if row.form == "int4" else None
    return quantize(read(tensor), row.form, row.group) if pair is None else pair


def _cut(row: Weight, pair: Pair, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, ...]:
    """The q and scale that the store holds of the inputs from ``start`` to ``stop``."""
    q, scale = pair[0][:, start:stop], pair[1]
    if FORMS[row.form].group is None:
        return q, scale
    group = math.gcd(q.shape[1], row.group)
    if group != row.group:
        scale = of_parts(scale, row.group // group)
    scale = scale[:, start // group : start // group + q.shape[1] // group]
    return packed(q, row.form, group), scale


def pieces(
    parameter: Weight, layer: int | None, config: Config, read: Read, stored: Stored = no_pair
) -> Iterator[Piece]:
    """The parts of one layer of a parameter in the order in which they lie in each TP shard.

    Args:
        layer: None for a parameter that is not stacked.
        stored: Returns q and scale of a tensor that is int4 in the checkpoint; None of any other.

    Yields:
        (TP shard, or None for an unsplit parameter; a part of each of its tensors, views where they can be).
    """
    groups = parameter.source.groups
    at = "" if layer is None else f"model.layers.{layer}."
    for group, parts in _parts(parameter, at, read, stored):
        yield None if parameter.split is None else group * config.tp_shards // groups, parts


def store_files(config: Config, dtype: str, weights: str = PLAIN) -> dict[str, dict[str, Tensor]]:
    """The store's files, one a stack, and the tensors in each."""
    files: dict[str, dict[str, Tensor]] = {}
    for row in weight_table(config, weights):
        files.setdefault(f"weights/{row.stack}.safetensors", {}).update(row.tensors(dtype))
    return files


def store_bytes(config: Config, dtype: str, weights: str = PLAIN) -> int:
    """Bytes of all weights in an artifact of ``dtype``, headers apart."""
    return sum(row.nbytes(dtype) for row in weight_table(config, weights))


def convert_parameter(
    parameter: Weight, source: WeightSource, writer: StoreWriter, dtype: str, progress: Callable[[int], None]
) -> None:
    """Writes one parameter, layer after layer."""
    tensors = parameter.tensors(dtype)
    offsets: dict[tuple[str, int | None], int] = {}
    for layer in parameter.layers or (None,):
        for shard, parts in pieces(parameter, layer, source.config, source.tensor, source.stored):
            for (name, tensor), part in zip(tensors.items(), parts, strict=True):
                target, stream = BY_NAME[tensor.dtype].numpy, (name, shard)
                value = part if part.dtype == target else part.astype(target)
                writer.write(name, value, shard=shard, offset=offsets.get(stream, 0))
                offsets[stream] = offsets.get(stream, 0) + value.nbytes
                progress(value.nbytes)


def convert(
    source: WeightSource,
    folder: Path,
    dtype: str,
    progress: Callable[[int], None] = lambda _: None,
    weights: str = PLAIN,
) -> dict[str, Tensor]:
    """Writes the whole store into ``weights/`` of ``folder`` and returns its index.

    Args:
        folder: An artifact that is not whole yet; the index's paths are relative to it.
        dtype: ``bfloat16`` or ``float32``, for every weight that is not an fp32 island.
        progress: Called with the bytes of each piece.
        weights: The forms, a key of ``artifacts/parameters.py``'s WEIGHTS.

    Raises:
        CheckpointError: A tensor is not finite although its dtype changes, or could not be read.
        ArtifactError: The disk is full.
    """
    rows = sorted(weight_table(source.config, weights), key=lambda row: -int(np.prod(row.shape)))
    writer = StoreWriter(folder, store_files(source.config, dtype, weights))
    try:
        with ThreadPoolExecutor(WORKERS) as pool:  # the first error cancels what has not begun
            list(pool.map(lambda row: convert_parameter(row, source, writer, dtype, progress), rows))
    except OSError as error:
        raise CheckpointError(f"checkpoint: could not be read: {error}") from error
    return writer.finish()


def write_weights(
    folder: Path, source: WeightSource, dtype: str, report: Progress, weights: str = PLAIN
) -> schema.WeightsRecord:
    """Writes the store ``weights/`` below ``folder``; returns its record for the manifest."""
    report.start("weights", store_bytes(source.config, dtype, weights))
    index = convert(source, folder, dtype, lambda amount: report.advance("weights", amount), weights)
    files = sorted({tensor.file for tensor in index.values()})
    return schema.WeightsRecord({file: (folder / file).stat().st_size for file in files}, index)

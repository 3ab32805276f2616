"""Checkpoint to store: cuts every tensor of the published layout into TP shards, as the parameter table says.

Nothing is held: a piece is a view of the mapped checkpoint, written to its place in the store. Only pieces that change
order or dtype, or are quantized, pass through memory, one at a time.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from ling3export.artifacts import schema
from ling3export.artifacts.schema import StoredTensor
from ling3export.artifacts.store import StoreWriter, TensorSpec
from ling3export.checkpoint.quantize import Pair, packed, quantize
from ling3export.checkpoint.reader import Checkpoint
from ling3export.checkpoint.synth_weights import DummyWeights
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import CheckpointError
from ling3export.model.config import Config
from ling3export.model.parameters import EXPERT, PLAIN, Parameter, parameters

WORKERS = 2  # hashing and copying both release the interpreter lock

Read = Callable[[str], np.ndarray]
Stored = Callable[[str], Pair | None]
Piece = tuple[int | None, tuple[np.ndarray, ...]]
WeightSource = Checkpoint | DummyWeights


class Progress(Protocol):
    """Where work that takes long tells how far it is."""

    def note(self, text: str) -> None:
        """A line for the user."""
        ...

    def start(self, stage: str, total: int) -> None:
        """A stage of ``total`` units begins."""
        ...

    def advance(self, stage: str, amount: int) -> None:
        """``amount`` more units are done."""
        ...


def no_pair(_: str) -> Pair | None:
    """What ``stored`` gives of a checkpoint that has nothing in int4."""
    return None


def _parts(row: Parameter, at: str, read: Read, stored: Stored) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
    """(group, part) of one layer, as :class:`parameters.Source` describes them; parts are views, or q and scale."""
    source = row.source
    if source.by_expert:
        for group in range(source.groups):
            for name in source.names:
                tensor = at + name.replace(EXPERT, str(group))
                yield group, (read(tensor),) if row.form == PLAIN else _cut(row, pair_of(row, tensor, read, stored))
        return
    values = [read(at + name) for name in source.names]
    each = values[0].shape[1 if source.columns else 0] // source.groups
    start, stop = source.rows or (0, each)
    if source.columns and row.form != PLAIN:  # whole, since a TP shard may end within a group of inputs
        pair = quantize(values[0], row.form, row.group)
        for group in range(source.groups):
            yield group, _cut(row, pair, group * each, (group + 1) * each)
        return
    for group in range(source.groups):
        for value in values:
            if source.columns:
                yield group, (value[:, group * each : (group + 1) * each].T,)
            else:
                part = value[group * each + start : group * each + stop]
                yield group, (part,) if row.form == PLAIN else _cut(row, quantize(part, row.form, row.group))


def pair_of(row: Parameter, tensor: str, read: Read, stored: Stored) -> Pair:
    """A checkpoint tensor of a quantized parameter: as the checkpoint has it where that is int4, too, else rounded."""
    found = stored(tensor) if row.form == "int4" else None
    return quantize(read(tensor), row.form, row.group) if found is None else found


def _cut(row: Parameter, pair: Pair, start: int = 0, stop: int | None = None) -> tuple[np.ndarray, ...]:
    """What the store holds of the inputs from ``start`` to ``stop``: q and scale."""
    q, scale = pair[0][:, start:stop], pair[1]
    if row.form == "int8-channel":
        return q, scale
    group = math.gcd(q.shape[1], row.group)
    if group != row.group:
        scale = np.repeat(scale, row.group // group, axis=1)
    scale = scale[:, start // group : start // group + q.shape[1] // group]
    return (packed(q, group) if row.form == "int4" else q), scale


def pieces(
    parameter: Parameter, layer: int | None, config: Config, read: Read, stored: Stored = no_pair
) -> Iterator[Piece]:
    """The parts of one layer of a parameter in the order in which they lie in each TP shard.

    Args:
        parameter: A row of the parameter table.
        layer: The layer, None for a parameter that is not stacked.
        config: The checkpoint's configuration.
        read: Gives a checkpoint tensor by name.
        stored: Gives q and scale of one that the checkpoint has in int4.

    Yields:
        (TP shard, or None for an unsplit parameter; a part of each of its tensors, views where they can be).
    """
    groups = parameter.source.groups
    at = "" if layer is None else f"model.layers.{layer}."
    for group, parts in _parts(parameter, at, read, stored):
        yield None if parameter.split is None else group * config.tp_shards // groups, parts


def store_files(config: Config, dtype: str, weights: str = PLAIN) -> dict[str, list[TensorSpec]]:
    """The store's files, one a stack, and the tensors in each."""
    files: dict[str, list[TensorSpec]] = {}
    for row in parameters(config, weights):
        for tensor in row.tensors(dtype):
            slabs = config.tp_shards if row.split else 0
            spec = TensorSpec(tensor.name, tensor.shape, BY_NAME[tensor.dtype].code, slabs)
            files.setdefault(f"weights/{row.stack}.safetensors", []).append(spec)
    return files


def store_bytes(config: Config, dtype: str, weights: str = PLAIN) -> int:
    """Bytes of all weights in an artifact of ``dtype``, headers apart."""
    return sum(row.nbytes(dtype) for row in parameters(config, weights))


def convert_parameter(
    parameter: Parameter, source: WeightSource, writer: StoreWriter, dtype: str, progress: Callable[[int], None]
) -> None:
    """Writes one parameter, layer after layer."""
    tensors = parameter.tensors(dtype)
    offsets: dict[tuple[str, int | None], int] = {}
    for layer in parameter.layers or (None,):
        for shard, parts in pieces(parameter, layer, source.config, source.tensor, source.stored):
            for tensor, part in zip(tensors, parts, strict=True):
                target, at = BY_NAME[tensor.dtype].numpy, (tensor.name, shard)
                value = part if part.dtype == target else part.astype(target)
                writer.write(tensor.name, value, slab=shard, offset=offsets.get(at, 0))
                offsets[at] = offsets.get(at, 0) + value.nbytes
                progress(value.nbytes)


def convert(
    source: WeightSource,
    folder: Path,
    dtype: str,
    progress: Callable[[int], None] = lambda _: None,
    weights: str = PLAIN,
) -> dict[str, StoredTensor]:
    """Writes the whole store into ``weights/`` of ``folder`` and returns its index.

    Args:
        source: An opened checkpoint.
        folder: An artifact that is not whole yet; the index's paths are relative to it.
        dtype: ``bfloat16`` or ``float32``, for every weight that is not an fp32 island.
        progress: Called with the bytes of each piece written.
        weights: In which forms, a key of ``model/parameters.py``'s WEIGHTS.

    Raises:
        CheckpointError: A tensor is not finite where its dtype changes, or could not be read.
        ArtifactError: The disk is full.
    """
    rows = sorted(parameters(source.config, weights), key=lambda row: -int(np.prod(row.shape)))
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
    """Writes the store ``weights/`` below ``folder``; returns what the manifest says of it."""
    report.start("weights", store_bytes(source.config, dtype, weights))
    index = convert(source, folder, dtype, lambda amount: report.advance("weights", amount), weights)
    files = sorted({tensor.file for tensor in index.values()})
    return schema.WeightsRecord({file: (folder / file).stat().st_size for file in files}, index)

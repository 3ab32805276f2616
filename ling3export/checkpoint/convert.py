"""Checkpoint to store: cuts every tensor of the published layout into TP shards, as the parameter table says.

Nothing is held: a piece is a view of the mapped checkpoint, written to its place in the store. Only pieces that change
order or dtype pass through memory, one at a time.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np

from ling3export.artifacts import schema
from ling3export.artifacts.schema import StoredTensor
from ling3export.artifacts.store import StoreWriter, TensorSpec
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import CheckpointError
from ling3export.model.config import Config
from ling3export.model.parameters import EXPERT, Parameter, Source, parameters

WORKERS = 2  # hashing and copying both release the interpreter lock

Read = Callable[[str], np.ndarray]
Piece = tuple[int | None, np.ndarray]


class WeightSource(Protocol):
    """What conversion needs of a checkpoint."""

    config: Config

    def tensor(self, name: str) -> np.ndarray:
        """A tensor by its published name."""
        ...


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


def _parts(source: Source, at: str, read: Read) -> Iterator[tuple[int, np.ndarray]]:
    """(group, part) of one layer, as :class:`parameters.Source` describes them; parts are views."""
    if source.by_expert:
        for group in range(source.groups):
            for name in source.names:
                yield group, read(at + name.replace(EXPERT, str(group)))
        return
    values = [read(at + name) for name in source.names]
    each = values[0].shape[1 if source.columns else 0] // source.groups
    start, stop = source.rows or (0, each)
    for group in range(source.groups):
        for value in values:
            if source.columns:
                yield group, value[:, group * each : (group + 1) * each].T
            else:
                yield group, value[group * each + start : group * each + stop]


def pieces(parameter: Parameter, layer: int | None, config: Config, read: Read) -> Iterator[Piece]:
    """The parts of one layer of a parameter in the order in which they lie in each TP shard.

    Args:
        parameter: A row of the parameter table.
        layer: The layer, None for a parameter that is not stacked.
        config: The checkpoint's configuration.
        read: Gives a checkpoint tensor by name.

    Yields:
        (TP shard, or None for an unsplit parameter; a numpy view).
    """
    source = parameter.source
    at = "" if layer is None else f"model.layers.{layer}."
    for group, part in _parts(source, at, read):
        yield None if parameter.split is None else group * config.tp_shards // source.groups, part


def store_files(config: Config, dtype: str) -> dict[str, list[TensorSpec]]:
    """The store's files, one a stack, and the tensors in each."""
    files: dict[str, list[TensorSpec]] = {}
    for row in parameters(config):
        spec = TensorSpec(
            row.name, row.shape, BY_NAME[row.stored_dtype(dtype)].code, config.tp_shards if row.split else 0
        )
        files.setdefault(f"weights/{row.stack}.safetensors", []).append(spec)
    return files


def store_bytes(config: Config, dtype: str) -> int:
    """Bytes of all weights in an artifact of ``dtype``, headers apart."""
    return sum(int(np.prod(row.shape)) * BY_NAME[row.stored_dtype(dtype)].nbytes for row in parameters(config))


def convert_parameter(
    parameter: Parameter, source: WeightSource, writer: StoreWriter, dtype: str, progress: Callable[[int], None]
) -> None:
    """Writes one parameter, layer after layer."""
    target = BY_NAME[parameter.stored_dtype(dtype)].numpy
    offsets: dict[int | None, int] = {}
    for layer in parameter.layers or (None,):
        for shard, value in pieces(parameter, layer, source.config, source.tensor):
            if value.dtype != target:
                value = value.astype(target)
            writer.write(parameter.name, value, slab=shard, offset=offsets.get(shard, 0))
            offsets[shard] = offsets.get(shard, 0) + value.nbytes
            progress(value.nbytes)


def convert(
    source: WeightSource, folder: Path, dtype: str, progress: Callable[[int], None] = lambda _: None
) -> dict[str, StoredTensor]:
    """Writes the whole store into ``weights/`` of ``folder`` and returns its index.

    Args:
        source: An opened checkpoint.
        folder: An artifact that is not whole yet; the index's paths are relative to it.
        dtype: ``bfloat16`` or ``float32``, for every weight that is not an fp32 island.
        progress: Called with the bytes of each piece written.

    Raises:
        CheckpointError: A tensor is not finite where its dtype changes, or could not be read.
        ArtifactError: The disk is full.
    """
    rows = sorted(parameters(source.config), key=lambda row: -int(np.prod(row.shape)))
    writer = StoreWriter(folder, store_files(source.config, dtype))
    with ThreadPoolExecutor(WORKERS) as pool:
        jobs = [pool.submit(convert_parameter, row, source, writer, dtype, progress) for row in rows]
        try:
            for job in jobs:
                job.result()
        except OSError as error:
            for job in jobs:
                job.cancel()
            raise CheckpointError(f"checkpoint: could not be read: {error}") from error
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
    return writer.finish()


def write_weights(folder: Path, source: WeightSource, dtype: str, report: Progress) -> schema.WeightsRecord:
    """Writes the store ``weights/`` below ``folder``; returns what the manifest says of it."""
    report.start("weights", store_bytes(source.config, dtype))
    index = convert(source, folder, dtype, lambda amount: report.advance("weights", amount))
    files = sorted({tensor.file for tensor in index.values()})
    return schema.WeightsRecord({file: (folder / file).stat().st_size for file in files}, index)

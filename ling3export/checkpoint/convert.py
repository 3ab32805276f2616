"""Checkpoint to store: cuts every tensor of the published layout into the slabs of ``model/parameters.py``.

Nothing is held: a piece is a view of the mapped checkpoint, written to its place in the store. Only pieces that change
order or dtype pass through memory, one at a time.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from ling3export.artifacts.manifest import sha256_of
from ling3export.artifacts.store import StoreWriter, TensorSpec
from ling3export.errors import CheckpointError
from ling3export.model.config import Config
from ling3export.model.parameters import Parameter, parameters

DTYPES = {"bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)), "float32": ("F32", np.dtype(np.float32))}
WORKERS = 2  # hashing and copying both release the interpreter lock

Read = Callable[[str], np.ndarray]
Piece = tuple[int | None, np.ndarray]


class Pieces(Protocol):
    """What takes the pieces of a store: its writer, or what only compares them."""

    def write(self, name: str, array: np.ndarray, *, slab: int | None, offset: int = 0) -> None:
        """Appends a piece to one slab of a tensor."""
        ...


class Source(Protocol):
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


def _rows(value: np.ndarray, slabs: int) -> Iterator[Piece]:
    """Cuts the leading axis."""
    each = value.shape[0] // slabs
    for slab in range(slabs):
        yield slab, value[slab * each : (slab + 1) * each]


def _columns(value: np.ndarray, slabs: int) -> Iterator[Piece]:
    """Cuts the input axis of a torch matrix ``[out, in]`` and turns each cut to ``[in, out]``."""
    each = value.shape[1] // slabs
    for slab in range(slabs):
        yield slab, value[:, slab * each : (slab + 1) * each].T


def _packed(values: list[np.ndarray], slabs: int, groups: int) -> Iterator[Piece]:
    """Cuts each of ``values`` into ``groups`` along its leading axis and lays them side by side, group by group."""
    split = [value.reshape(groups, value.shape[0] // groups, *value.shape[1:]) for value in values]
    for group in range(groups):
        for value in split:
            yield group * slabs // groups, value[group]


def _kda(name: str, layer: int, config: Config, read: Read) -> Iterator[Piece]:
    slabs, heads, at = config.slabs, config.num_attention_heads, f"model.layers.{layer}.attention."
    if name == "qkvfg_proj":
        yield from _packed([read(f"{at}{x}_proj.weight") for x in "qkvfg"], slabs, heads)
    elif name == "conv1d":
        yield from _packed([read(f"{at}{x}_conv1d.weight") for x in "qkv"], slabs, heads)
    elif name == "o_proj":
        yield from _columns(read(f"{at}o_proj.weight"), slabs)
    elif name == "o_norm":
        yield None, read(f"{at}o_norm.weight")
    elif name == "b_proj":
        yield from _rows(read(f"{at}b_proj.weight"), slabs)
    else:
        yield from _rows(read(at + name), slabs)


def _mla(name: str, layer: int, config: Config, read: Read) -> Iterator[Piece]:
    slabs, at = config.slabs, f"model.layers.{layer}.attention."
    if name in ("w_uk", "w_uv"):
        both = read(f"{at}kv_b_proj.weight")
        both = both.reshape(config.num_attention_heads, -1, both.shape[-1])
        nope = config.qk_nope_head_dim
        for slab, part in _rows(both, slabs):
            for head in part:
                yield slab, head[:nope] if name == "w_uk" else head[nope:]
    elif name == "dense":
        yield from _columns(read(f"{at}dense.weight"), slabs)
    elif name in ("q_b_proj", "q_proj", "g_proj"):
        yield from _rows(read(f"{at}{name}.weight"), slabs)
    else:
        yield None, read(f"{at}{name}.weight")


def _mlp(at: str, gate_up: bool, slabs: int, read: Read) -> Iterator[Piece]:
    if gate_up:
        yield from _packed([read(f"{at}gate_proj.weight"), read(f"{at}up_proj.weight")], slabs, slabs)
    else:
        yield from _columns(read(f"{at}down_proj.weight"), slabs)


def _moe(name: str, layer: int, config: Config, read: Read) -> Iterator[Piece]:
    slabs, at = config.slabs, f"model.layers.{layer}.mlp."
    each = config.num_experts // slabs
    if name == "gate":
        yield None, read(f"{at}gate.weight")
    elif name == "expert_bias":
        yield None, read(f"{at}gate.expert_bias")
    elif name.startswith("shared_"):
        yield from _mlp(f"{at}shared_experts.", name == "shared_gate_up_proj", slabs, read)
    else:
        kinds = ("gate", "up") if name == "experts_gate_up_proj" else ("down",)
        for expert in range(config.num_experts):
            for kind in kinds:
                yield expert // each, read(f"{at}experts.{expert}.{kind}_proj.weight")


def pieces(parameter: Parameter, layer: int | None, config: Config, read: Read) -> Iterator[Piece]:
    """The parts of one stack row in the order in which they lie in each slab.

    Args:
        parameter: A row of the parameter table.
        layer: The layer, None for a parameter that is not stacked.
        config: The checkpoint's configuration.
        read: Gives a checkpoint tensor by name.

    Yields:
        (slab, or None for an unsplit parameter; a numpy view).
    """
    stack, _, name = parameter.name.partition(".")
    if layer is None:
        key = {"word_embeddings": "model.word_embeddings", "norm": "model.norm", "lm_head": "lm_head"}[name]
        value = read(f"{key}.weight")
        if parameter.split:
            yield from _rows(value, config.slabs)
        else:
            yield None, value
    elif stack == "layers":
        yield None, read(f"model.layers.{layer}.{name}.weight")
    elif stack == "kda":
        yield from _kda(name, layer, config, read)
    elif stack == "mla":
        yield from _mla(name, layer, config, read)
    elif stack == "moe":
        yield from _moe(name, layer, config, read)
    else:
        yield from _mlp(f"model.layers.{layer}.mlp.", name == "gate_up_proj", config.slabs, read)


def stored_dtype(parameter: Parameter, dtype: str) -> str:
    """``bfloat16`` or ``float32``: what the store holds for ``parameter`` in an artifact of ``dtype``."""
    return dtype if parameter.dtype == "model" else parameter.dtype


def store_files(config: Config, dtype: str) -> dict[str, list[TensorSpec]]:
    """The store's files, one a stack, and the tensors in each."""
    files: dict[str, list[TensorSpec]] = {}
    for row in parameters(config):
        spec = TensorSpec(row.name, row.shape, DTYPES[stored_dtype(row, dtype)][0], config.slabs if row.split else 0)
        files.setdefault(f"{row.stack}.safetensors", []).append(spec)
    return files


def store_bytes(config: Config, dtype: str) -> int:
    """Bytes of all weights in an artifact of ``dtype``, headers apart."""
    return sum(int(np.prod(row.shape)) * DTYPES[stored_dtype(row, dtype)][1].itemsize for row in parameters(config))


def convert_parameter(
    parameter: Parameter, source: Source, writer: "Pieces", dtype: str, progress: Callable[[int], None]
) -> None:
    """Writes one stacked parameter, layer after layer."""
    target = DTYPES[stored_dtype(parameter, dtype)][1]
    offsets: dict[int | None, int] = {}
    for layer in parameter.layers or (None,):
        for slab, value in pieces(parameter, layer, source.config, source.tensor):
            if value.dtype != target:
                value = value.astype(target)
            writer.write(parameter.name, value, slab=slab, offset=offsets.get(slab, 0))
            offsets[slab] = offsets.get(slab, 0) + value.nbytes
            progress(value.nbytes)


def convert(
    source: Source, folder: Path, dtype: str, progress: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Writes the whole store into ``folder`` and returns its index.

    Args:
        source: An opened checkpoint.
        folder: An existing folder, inside an artifact that is not whole yet.
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


def write_weights(folder: Path, source: Source, dtype: str, report: Progress) -> dict[str, Any]:
    """Writes the store ``weights/`` below ``folder``; returns what the manifest says of it."""
    store = folder / "weights"
    store.mkdir()
    report.start("weights", store_bytes(source.config, dtype))
    index = convert(source, store, dtype, lambda amount: report.advance("weights", amount))
    sizes = {entry["file"]: (store / entry["file"]).stat().st_size for entry in index.values()}
    return {
        "files": {name: {"bytes": size} for name, size in sorted(sizes.items())},
        "index": index,
        "digest": sha256_of({name: entry["sha256"] for name, entry in index.items()}),
        "bytes": sum(sizes.values()),
    }

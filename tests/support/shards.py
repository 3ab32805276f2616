"""Changes files of a checkpoint byte by byte, without the product's reader and writer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
Tensors = dict[str, tuple[str, list[int], bytes]]  # dtype, shape and bytes by name


def read_shard(path: Path) -> Tensors:
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], entry["shape"], raw[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
        for name, entry in header.items()
    }


def write_shard(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    write_raw(path, json.dumps(header).encode(), b"".join(data for _, _, data in tensors.values()))


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def home(folder: Path, name: str) -> Path:
    return folder / str(json.loads((folder / INDEX).read_text())["weight_map"][name])


def edit(folder: Path, name: str, change: Callable[[Tensors], object]) -> str:
    """Rewrites the shard that holds a tensor; returns the shard's name."""
    path = home(folder, name)
    tensors = read_shard(path)
    change(tensors)
    write_shard(path, tensors)
    return path.name


def put(folder: Path, beside: str, name: str, tensor: tuple[str, list[int], bytes] | None) -> str:
    """Puts (None: removes) a tensor into the shard of the tensor ``beside`` and the index; returns the shard."""

    def change(tensors: dict[str, Any]) -> None:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor

    shard = edit(folder, beside, change)
    edit_index(folder, lambda names: names.pop(name, None) if tensor is None else names.update({name: shard}))
    return shard

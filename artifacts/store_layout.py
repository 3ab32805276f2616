"""Where each tensor lies in a weight file: their order, and the safetensors header."""

import json
from collections.abc import Mapping

from ling3export.artifacts.parameters import ALIGNMENT, Tensor
from ling3export.foundation.dtypes import BY_NAME

HEADER_MULTIPLE = 4096


def arranged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The order in a file: aligned tensors first, so that each starts at a multiple of 64; the others last.

    safetensors allows no holes between tensors, so order is the only way to align. The others go by falling
    item size, so that each still starts at a multiple of its own. Otherwise the given order holds.
    """

    def place(item: tuple[str, Tensor]) -> int:
        return 0 if item[1].aligned else ALIGNMENT - BY_NAME[item[1].dtype].nbytes

    return dict(sorted(tensors.items(), key=place))


def header(tensors: Mapping[str, Tensor]) -> bytes:
    """The first bytes of a file that holds ``tensors``, by name, in this order, without holes.

    Eight bytes of little-endian length, then JSON padded with spaces so that the data starts at a multiple of 4096.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "ling3"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        code = BY_NAME[tensor.dtype].code
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_MULTIPLE)
    return len(text).to_bytes(8, "little") + text

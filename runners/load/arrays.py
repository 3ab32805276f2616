"""Arrays in a message between hosts: a JSON value with the arrays' forms, a zero byte, and their bytes."""

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ling3export.foundation.dtypes import BY_NAME


def packed(said: object, arrays: Iterable[np.ndarray]) -> bytes:
    """The bytes of a message.

    Args:
        said: Any JSON value.
        arrays: Of dtypes that a state has.
    """
    whole = [np.ascontiguousarray(each) for each in arrays]
    head = json.dumps([said, [[each.dtype.name, each.shape] for each in whole]]).encode()
    return b"".join([head, b"\0", *(each.reshape(-1).view(np.uint8).data for each in whole)])


def unpacked(message: bytes) -> tuple[Any, list[np.ndarray]]:
    """What ``packed`` was given; the arrays lie in the message."""
    at = message.index(b"\0") + 1
    said, forms = json.loads(message[: at - 1])
    found = []
    for name, shape in forms:
        dtype = BY_NAME[name].numpy
        size = dtype.itemsize * math.prod(shape)
        found.append(np.frombuffer(message, np.uint8, size, at).view(dtype).reshape(shape))
        at += size
    return said, found

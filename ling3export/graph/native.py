"""FLOPs and bytes of custom calls: the model's native kernels by formula, libraries' products, and anything else.

A native kernel (``model/native/calls.py``) reads one layer of stacks whose axis 1, or 0 for a parameter without shards,
is the layer. It is counted for a full batch: every row in use, experts chosen evenly, sequences as long as the context
says. FLOPs are those of matrix products, as everywhere in the account.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ling3export.graph.context import Context
from ling3export.graph.hlo import ARRAY, dims, large_bytes, shape_bytes

NATIVE = re.compile(r"ling3_([a-z]+)(?:_\w+)?(?:\..*)?")
# Names that the compiler gives to a view of values, to a placement or to scratch memory: they move nothing.
VIEWS = re.compile(r"ConcatBitcast|AllocateBuffer|Sharding|SPMD\w+|annotate_device_placement")
PRODUCT = re.compile(r"__cublas\S*")
CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


@dataclass(frozen=True)
class Cost:
    """FLOPs of one run, bytes read of each operand, bytes written of each result."""

    flops: float
    read: tuple[float, ...]
    written: tuple[float, ...]


@dataclass(frozen=True)
class _Array:
    dims: tuple[int, ...]
    bytes: float

    def layer(self, axis: int = 1) -> float:
        """Bytes of one layer of a stack."""
        return self.bytes / self.dims[axis]


Arrays = Sequence[_Array]


def cost(target: str, operands: Sequence[str], result: str, attributes: str, context: Context) -> Cost:
    """The cost of one run of a custom call, by the types of its operands and of its result and its other text.

    Raises:
        ValueError: A native kernel has another number of operands or axes than its formula.
    """
    if VIEWS.fullmatch(target):
        return Cost(0.0, (0.0,) * len(operands), (0.0,) * len(ARRAY.findall(result)))
    arrays, results = [_array(one) for one in operands], _arrays(result)
    match = NATIVE.fullmatch(target)
    if match and match[1] in KERNELS:
        try:
            return KERNELS[match[1]](arrays, results, context)
        except (ValueError, IndexError, ZeroDivisionError) as error:
            raise ValueError(f"{target}: its operands have not the axes of this kernel") from error
    contracted = CONTRACTED.search(attributes) if PRODUCT.fullmatch(target) else None
    axes = re.findall(r"\d+", contracted[1]) if contracted else []
    flops = 2.0 * math.prod(results[0].dims) * math.prod(arrays[0].dims[int(axis)] for axis in axes) if axes else 0.0
    return Cost(flops, tuple(map(float, map(large_bytes, operands))), tuple(one.bytes for one in results))


def _array(text: str) -> _Array:
    match = ARRAY.search(text)
    return _Array(dims(match[2]) if match else (), float(shape_bytes(text)))


def _arrays(text: str) -> list[_Array]:
    return [_array(match[0]) for match in ARRAY.finditer(text)]


def _whole(arrays: Arrays) -> tuple[float, ...]:
    return tuple(one.bytes for one in arrays)


def _product(operands: Arrays, results: Arrays, context: Context) -> Cost:
    """``columns`` and ``rows``: x, a stack in one or two arrays, the layer's number; of ``heads``, a matrix a head."""
    x, *stack, layer = operands
    (y,) = results
    # x [T, groups, X] with y [T, groups, Y]: a matrix for each group. Any other product adds up a whole row of x.
    depth = x.dims[-1] if len(x.dims) == len(y.dims) == 3 else math.prod(x.dims[1:])
    read = (x.bytes, *(part.layer() for part in stack), layer.bytes)
    return Cost(2.0 * math.prod(y.dims) * depth, read, _whole(results))


def _experts(operands: Arrays, results: Arrays, context: Context) -> Cost:
    """x, gate and up, down (each one array or two), the layer's number, chosen experts, their shares, the limit."""
    x, *stacks, layer, chosen, share, limit = operands
    shards, _, held, _, width = stacks[0].dims[:5]
    local, (tokens, top) = shards * held, chosen.dims
    routed = max(context.experts, local)
    read = 1 - (1 - top / routed) ** tokens
    flops = 2.0 * 3 * width * x.dims[-1] * tokens * top * local / routed
    moved = (x.bytes, *(part.layer() * read for part in stacks), layer.bytes, chosen.bytes, share.bytes, limit.bytes)
    return Cost(flops, moved, _whole(results))


def _route(operands: Arrays, results: Arrays, context: Context) -> Cost:
    x, gate, bias, layer = operands
    read = (x.bytes, gate.layer(0), bias.layer(0), layer.bytes)
    return Cost(2.0 * x.dims[0] * math.prod(gate.dims[1:]), read, _whole(results))


def _token(operands: Arrays, results: Arrays, context: Context) -> Cost:
    """KDA between its two large products: b_proj, and the state's two reads and its update in each head."""
    pool, windows, y, x, b_proj, filters, rates, biases, norms, *rest = operands
    rows, heads, key = y.dims[0], pool.dims[2], pool.dims[3]
    parts = [rows * pool.layer(0) / pool.dims[1], rows * windows.layer(0) / windows.dims[1]]
    weights = [*(part.layer() for part in (b_proj, filters, rates, biases)), norms.layer(0)]
    flops = 2.0 * rows * heads * (x.dims[-1] + 2 * key * key)
    read = (*parts, y.bytes, x.bytes, *weights, *_whole(rest))
    return Cost(flops, read, (*parts, results[2].bytes))


def _best(operands: Arrays, results: Arrays, context: Context) -> Cost:
    return Cost(0.0, _whole(operands), _whole(results))


def _attention(operands: Arrays, results: Arrays, context: Context) -> Cost:
    """Scores and values of each sequence over its cached pages."""
    query, pool, layer, table, length = operands
    rows, heads, row = query.dims
    pages = table.dims[1] if context.pages is None else min(context.pages, table.dims[1])
    tokens = pages * pool.dims[2]
    flops = 2.0 * rows * heads * tokens * (row + results[0].dims[-1])
    read = (query.bytes, rows * pages * pool.layer(0) / pool.dims[1], layer.bytes, table.bytes, length.bytes)
    return Cost(flops, read, _whole(results))


KERNELS: Mapping[str, Callable[[Arrays, Arrays, Context], Cost]] = {
    "columns": _product,
    "rows": _product,
    "experts": _experts,
    "route": _route,
    "token": _token,
    "best": _best,
    "attention": _attention,
}

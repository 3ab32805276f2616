"""Whether a manifest's numbers agree: with each other, and with the sizes of the files that they describe.

Types and bounds of single fields are in `schema`. What passes here can be loaded without looking twice: a pool has the
rows that its state arrays have, a field ends where the next begins, every program takes the parameters and the state
that its target has.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby, zip_longest
from typing import NoReturn

from ling3export.artifacts.program_records import Array
from ling3export.artifacts.records import WrongRecordError, shown
from ling3export.artifacts.schema import (
    GIVERS,
    MOVING,
    ON_LOGITS,
    SPLIT,
    Cell,
    Manifest,
    ParameterRecord,
    PlanRecord,
    StoredTensor,
    Target,
    Vectors,
)
from ling3export.foundation.dtypes import BY_CODE
from ling3export.foundation.errors import listed

A_CALL = ("layer", "out_num", "group")  # fields with one number
A_TOKEN = ("tokens", "next_token")  # fields of prefill and score with a number for each token, not for each chunk


def check_agreement(manifest: Manifest) -> None:
    """Compares what a manifest says in several places.

    Raises:
        WrongRecordError: Two places contradict each other; says where, what follows from the one, and what was found.
    """
    vocabulary, ends = manifest.config.get("vocab_size"), manifest.config.get("eos_token_id")
    with _at("config"):
        if type(vocabulary) is not int or vocabulary < 1:
            _wrong("a positive `vocab_size`", vocabulary)
        if not isinstance(ends, tuple) or any(each >= vocabulary for each in ends):
            _wrong(f"`eos_token_id` to be a list of token ids below {vocabulary}", ends)
    files, index = manifest.weights.files, manifest.weights.index
    _same("the files that the index names", {tensor.file for tensor in index.values()}, set(files), "weights", "files")
    for name, tensor in index.items():
        with _at("weights", "index", name):
            _check_tensor(tensor, files[tensor.file])
    for name, target in manifest.targets.items():
        with _at("targets", name):
            _same("its platform, kind, topology and TP", f"{target.text}-tp{target.tp}".replace(":", "-"), name)
            for at, parameter in enumerate(target.parameters):
                with _at("parameters", at):
                    _check_parameter(parameter, index)
            _check_target(target, manifest.plan)
    if bool(index) != (manifest.vectors.expected is not None):
        _wrong(
            "`weights` and `vectors.expected` together, or neither", "only weights" if index else "only expectations"
        )
    with _at("vectors"):
        _check_vectors(manifest.vectors, vocabulary, manifest.targets)


@contextmanager
def _at(*path: object) -> Iterator[None]:
    """Names where a contradiction within the block was found."""
    try:
        yield
    except WrongRecordError as error:
        error.path.extend(reversed(path))
        raise


def _wrong(expected: str, found: object, *path: object) -> NoReturn:
    raise WrongRecordError(expected, _short(found), path)


def _same(what: str, expected: object, found: object, *path: object) -> None:
    if expected != found:
        _wrong(f"{_short(expected)}, {what}", found, *path)


def _same_each(what: str, expected: Iterable[object], found: Iterable[object], *path: object) -> None:
    """Compares lists, and shows the first pair that differs; its number takes the place of the braces in ``what``."""
    for at, (one, other) in enumerate(zip_longest(expected, found)):
        _same(what.format(at), one, other, *path)


def _short(value: object) -> str:
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return f"[{listed([_short(each) for each in items], 8)}]"
    return shown(value)


def _check_tensor(tensor: StoredTensor, size: int) -> None:
    if tensor.slabs:
        _same("a leading axis of its slabs", (tensor.slabs,), tensor.shape[:1], "shape")
    _same("the bytes of a slab of its shape", tensor.nbytes // tensor.parts, tensor.slab_bytes, "slab_bytes")
    _same("one digest a slab", tensor.parts, len(tensor.sha256), "sha256")
    if tensor.offset + tensor.nbytes > size:
        _wrong(f"a tensor that ends within the {size:,} bytes of its file", tensor.offset, "offset")


def _check_target(target: Target, plan: PlanRecord) -> None:
    mesh, state, geometry = target.mesh, target.state, target.geometry
    if len(set(mesh.devices)) != target.tp:
        _wrong("every device once", mesh.devices, "mesh", "devices")
    if len(mesh.hosts) != target.tp or set(mesh.hosts) != set(range(target.processes)):
        _wrong(f"for each of {target.tp} devices its host, counted from 0", mesh.hosts, "mesh", "hosts")
    facts: dict[str, tuple[object, str]] = {
        "slots": (plan.max_running, "as the plan says"),
        "pages": (state.pages, "as the state says"),
        "page_size": (plan.page_size, "as the plan says"),
        "max_pages": (-(-plan.context // plan.page_size), "what the plan's context needs"),
        "placement": (state.placement, "as the state says"),
        "tp": (target.tp, "as the mesh says"),
        "dtype": (plan.dtype, "as the plan says"),
    }
    if "form" in geometry:
        striped = geometry["form"] == "tiles" and target.tp > 1
        facts["placement"] = "striped" if striped else "replicated", "as the geometry's form and TP say"
    for where, said in (("state", vars(state)), ("geometry", geometry)):
        for name, (fact, source) in ((each, facts[each]) for each in facts if each in said):
            _same(source, fact, said[name], where, name)
    if bool(target.kernel_names) != (target.kernels is not None):
        _wrong("`kernels` where the geometry names some, else none", target.kernel_names, "geometry", "kernels")
    if target.state_program is not None and target.platform != "cpu":
        _wrong("a program that gives the state for cpu alone", target.platform, "state_program")
    dummies = target.tp if state.placement == "striped" else 1
    snapshots = state.snapshots or 0
    _same("as the state says", snapshots, geometry.get("snapshots", 0), "geometry", "snapshots")
    sizes = {"slots": state.slots + snapshots + 1, "pages": state.pages + dummies, "page": state.page_size}
    for at, array in enumerate(state.arrays):
        with _at("state", "arrays", at):
            _same("a word for each axis", len(array.shape), len(array.axes), "axes")
            for word, size in zip(array.axes, array.shape, strict=True):
                _same(f"the size of the axis `{word}`", sizes.get(word, size), size, "shape")
    for name, cell in target.cells.items():
        with _at("cells", name):
            _same("its phase and padding", cell.name, name)
            _check_cell(cell, target)
    with _at("cells"):
        for phase, paddings in (("prefill", plan.paddings), ("decode", plan.decode_paddings)):
            _same(f"the plan's {phase} paddings", paddings, target.paddings(phase))
        for phase in MOVING:
            _same(f"how many {phase} programs there are", int(bool(snapshots)), len(target.paddings(phase)))
            if snapshots and phase != "copy":
                _same(f"the padding of {phase}, that of offload", target.paddings("offload"), target.paddings(phase))
        rows = {cell.rows for cell in target.cells.values() if cell.phase in GIVERS}
        for phase in ON_LOGITS:
            if missing := sorted(rows - set(target.paddings(phase))):
                _wrong(f"a program {phase}@{missing[0]}, for as many rows of logits", None)
        if any(cell.phase in SPLIT for cell in target.cells.values()):
            for phase in ("attend", "combine", "head"):
                _same(f"the paddings of decode, as {phase}'s", plan.decode_paddings, target.paddings(phase))
            _same("the paddings of experts, as dispatch's", target.paddings("experts"), target.paddings("dispatch"))


def _check_parameter(parameter: ParameterRecord, tensors: Mapping[str, StoredTensor]) -> None:
    if tensors:  # none where there are programs alone
        if (stored := tensors.get(parameter.tensor)) is None:
            _wrong("a tensor of the weight index", parameter.tensor, "tensor")
        _same("as the weight index says", stored.shape, parameter.shape, "shape")
        _same("as the weight index says", BY_CODE[stored.dtype].name, parameter.dtype, "dtype")
    index, axis, shape = parameter.index, parameter.axis, parameter.shape
    if (index is None) != (axis is None):
        _wrong("`index` and `axis` together, or neither", "only index" if axis is None else "only axis")
    if axis is not None and index is not None and (axis >= len(shape) or index >= shape[axis]):
        _wrong(f"an index within {_short(shape)}", f"{index} of axis {axis}")


def _check_cell(cell: Cell, target: Target) -> None:
    chunk, pages = target.state.chunk, target.state.max_pages
    chunked = cell.phase in ("prefill", "score")
    if chunked and cell.padding % chunk:
        _wrong(f"a multiple of the chunk, {chunk}", cell.padding, "padding")
    rows = cell.padding // chunk if chunked else cell.padding
    offset = 0
    for at, field in enumerate(cell.fields):
        of_field = cell.padding if field.name in A_TOKEN else 1 if field.name in A_CALL else rows
        if field.name == "slot" and cell.phase in MOVING:
            of_field = 1
        shape = (of_field, pages) if field.name == "page_table" else (of_field,)
        _same("where the field before it ends", offset, field.offset, "fields", at, "offset")
        _same("the shape of the field", shape, field.shape, "fields", at, "shape")
        offset += field.size
    _check_leaves(cell, target)
    scale = _scale(target)
    results = {
        "decode": {"logits": rows},
        "prefill": {"logits": rows},
        "score": {"logits": rows, "logprob": cell.padding, "best": cell.padding},
        "sample": {"token": rows, "logprob": rows},
        "attend": dict.fromkeys(("residual", "tokens", "expert_ids", "weights"), rows),
        "dispatch": {"y": rows, "gather_idx": rows, "actual_token_num": 1, "dropped": 1} | dict.fromkeys(scale, rows),
        "experts": {"results": rows},
        "combine": {"hidden": rows},
        "head": {"logits": rows},
        "logits_processor": dict.fromkeys(("logits", "logprob", "top_token", "top_logprob"), rows),
    }.get(cell.phase, {})
    found = {leaf.name: leaf.shape[:1] for leaf in cell.outputs if leaf.group == "out"}
    for name, count in results.items():
        _same(f"the rows of the result {name}", (count,), found.get(name), "outputs")
    if cell.phase in MOVING:
        _check_moved(cell, target)
    if (cell.exec is None) != (cell.call is None):
        _wrong("`exec` and `call` together, or neither", "only call" if cell.exec is None else "only exec")
    if cell.call is not None:
        donated = [each.donated for each in cell.call.inputs]
        state = [leaf.group == "state" for leaf in cell.inputs]
        _same_each("whether input {} is state, which is donated", state, donated, "call", "inputs")
        _same_each("input {} of the cell", _kinds(cell.inputs), _kinds(cell.call.inputs), "call", "inputs")
        _same_each("output {} of the cell", _kinds(cell.outputs), _kinds(cell.call.outputs), "call", "outputs")


def _scale(target: Target) -> list[str]:
    """What ``dispatch`` gives to ``experts`` besides tokens of 8 bits."""
    return ["dynamic_scale"] if target.geometry.get("token_dtype") == "int8" else []


def _check_moved(cell: Cell, target: Target) -> None:
    """What ``offload`` gives and ``onload`` takes is one slot of each pool, or as many pages as the padding says."""
    sides = {"copy": ((), ""), "onload": (cell.inputs, "batch")}
    leaves, group = sides.get(cell.phase, (cell.outputs, "out"))
    found = {leaf.name: leaf for leaf in leaves if leaf.group == group and leaf.name != "packed"}
    pools = {each.name: each for each in target.state.arrays if "slots" not in each.axes or len(each.axes) > 1}
    _same("every pool of the state", sorted(pools if leaves else ()), sorted(found), "outputs")
    for name, leaf in found.items():
        layers, _, *each = pools[name].shape
        shape = (layers, cell.padding, *each[:-1]) if "pages" in pools[name].axes else (layers, *each)
        width = len(shape)
        _same(f"the shape of {name}", (shape, pools[name].dtype), (leaf.shape[:width], leaf.dtype), "outputs")
    if cell.phase != "copy" and cell.padding % (target.tp if target.state.placement == "striped" else 1):
        _wrong(f"a multiple of {target.tp}, over which pages are striped", cell.padding, "padding")


def _check_leaves(cell: Cell, target: Target) -> None:
    sides = (("inputs", cell.inputs, ("params", "state", "batch")), ("outputs", cell.outputs, ("state", "out")))
    arrays = sorted(target.state.arrays, key=lambda array: array.name)
    if cell.phase in SPLIT and cell.phase != "attend":
        arrays = []  # they know no sequences
    if cell.phase in (*ON_LOGITS, *MOVING):  # the last tokens alone, all but them, or none; others take every array
        arrays = [array for array in arrays if any(leaf.name == array.name for leaf in cell.inputs)]
    for side, leaves, order in sides:
        groups = [group for group, _ in groupby(leaves, key=lambda leaf: leaf.group)]
        _same("each group once and in this order", [group for group in order if group in groups], groups, side)
        if len({(leaf.group, leaf.name) for leaf in leaves}) != len(leaves):
            _wrong("each name once in a group", [leaf.name for leaf in leaves], side)
        found = [_array(leaf) for leaf in leaves if leaf.group == "state"]
        _same_each("the target's state array {}", map(_array, arrays), found, side)
    arguments = {parameter.argument: parameter for parameter in target.parameters}
    for leaf in (each for each in cell.inputs if each.group == "params"):
        parameter = arguments.get(leaf.name)
        if parameter is None:
            _wrong("a parameter of the target", leaf.name, "inputs")
        shape, axis = parameter.shape, parameter.axis
        if axis is not None:
            shape = shape[:axis] + shape[axis + 1 :]
        _same(f"parameter {shown(leaf.name)}", (shape, parameter.dtype), (leaf.shape, leaf.dtype), "inputs")
    batch = {leaf.name: leaf for leaf in cell.inputs if leaf.group == "batch"}
    more = {
        "sample": ["logits"],
        "logits_processor": ["edits", "logits", "mask", "token"],
        "onload": [array.name for array in arrays],
        "attend": ["hidden"],
        "dispatch": ["token_data"],
        "experts": [*_scale(target), "group_list", "y"],
        "combine": ["expert_ids", "residual", "results", "weights"],
        "head": ["hidden"],
    }
    names = sorted([*more.get(cell.phase, []), *["packed"] * bool(cell.fields)])
    _same("the batch of the phase", names, list(batch), "inputs")
    if packed := batch.get("packed"):
        _same("the packed fields", ((cell.packed,), "int32"), (packed.shape, packed.dtype), "inputs")


def _array(array: Array) -> tuple[object, ...]:
    return array.name, array.shape, array.dtype, array.spec


def _kinds(arrays: Iterable[Array]) -> list[tuple[object, ...]]:
    return [(array.shape, array.dtype) for array in arrays]


def _check_vectors(vectors: Vectors, vocabulary: int, targets: Mapping[str, Target]) -> None:
    for at, sequence in enumerate(vectors.sequences):
        with _at("sequences", at):
            ids, positions = sequence.ids, sequence.positions
            if not ids or max(ids) >= vocabulary:
                _wrong(f"token ids below {vocabulary}", ids, "ids")
            if not 1 <= sequence.prompt <= len(ids):
                _wrong(f"1 to {len(ids)} tokens", sequence.prompt, "prompt")
            if not positions or positions != tuple(sorted(set(positions))) or positions[-1] >= len(ids):
                _wrong(f"ascending positions below {len(ids)}", positions, "positions")
    for where, found in (("receipts", vectors.receipts), ("portable", vectors.portable or {})):
        for name, receipts in found.items():
            cells = targets[name].cells if name in targets else {}
            named = {*receipts.cells, *getattr(receipts, "lacking", ())}
            if unknown := sorted(named - cells.keys()):
                _wrong("receipts of cells that there are", unknown[0], where, name)

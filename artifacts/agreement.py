"""Whether a manifest's numbers agree: with each other, and with the sizes of the files that they describe.

Types and bounds of single fields are in `schema`. What passes here can be loaded without looking twice: a pool has the
rows that its state arrays have, a field ends where the next begins, every program takes the parameters and the state
that its target has.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from ling3export.artifacts.records import WrongRecordError, shown
from ling3export.artifacts.schema import (
    Cell,
    CellName,
    Leaf,
    Manifest,
    Plan,
    State,
    StateArray,
    StoredTensor,
    Target,
    Vectors,
    Weights,
)
from ling3export.dtypes import BY_CODE
from ling3export.errors import listed

# The rows of a field for each phase, by what a padding counts: every row, or every chunk of rows.
ROW_FIELDS = {"tokens", "next_token", "slot", "position", "token", "temperature", "top_k", "top_p", "seed"}


def check_agreement(manifest: Manifest) -> None:
    """Compares what a manifest says in several places.

    Raises:
        WrongRecordError: Two places contradict each other; says where, what follows from the one, and what was found.
    """
    vocabulary, ends = manifest.config.get("vocab_size"), manifest.config.get("eos_token_id")
    with _at("config"):
        if type(vocabulary) is not int or vocabulary < 1:
            raise WrongRecordError("a positive `vocab_size`", shown(vocabulary))
        if not isinstance(ends, tuple) or any(each >= vocabulary for each in ends):
            _wrong(f"`eos_token_id` to be a list of token ids below {vocabulary}", ends)
    with _at("weights"):
        _check_weights(manifest.weights)
    for name, target in manifest.targets.items():
        with _at("targets", name):
            _check_target(name, target, manifest.plan, manifest.weights)
    with _at("vectors"):
        _check_vectors(manifest.vectors, manifest, vocabulary)


@contextmanager
def _at(*path: object) -> Iterator[None]:
    """Names where a contradiction within the block was found."""
    try:
        yield
    except WrongRecordError as error:
        error.path.extend(reversed(path))
        raise


def _wrong(expected: str, found: object, *path: object) -> None:
    raise WrongRecordError(expected, found if isinstance(found, str) else shown(found), path)


def _same(what: str, expected: object, found: object, *path: object) -> None:
    if expected != found:
        _wrong(f"{_short(expected)}, {what}", _short(found), *path)


def _short(value: object) -> str:
    if isinstance(value, (list, tuple, set)):
        return f"[{listed([_short(each) for each in value], 8)}]"
    return shown(value)


def _check_weights(weights: Weights) -> None:
    if weights.files.keys() != {tensor.file for tensor in weights.index.values()}:
        _wrong("the files that the index names", _short(sorted(weights.files)), "files")
    for name, tensor in weights.index.items():
        with _at("index", name):
            _check_tensor(tensor, weights.files[tensor.file])


def _check_tensor(tensor: StoredTensor, size: int) -> None:
    elements = 1
    for extent in tensor.shape:
        elements *= extent
    parts = max(tensor.slabs, 1)
    if tensor.slabs and tensor.shape[:1] != (tensor.slabs,):
        _wrong(f"a leading axis of {tensor.slabs} slabs", _short(tensor.shape), "shape")
    _same(
        "the bytes of a slab of its shape",
        elements * BY_CODE[tensor.dtype].nbytes // parts,
        tensor.slab_bytes,
        "slab_bytes",
    )
    _same("one digest a slab", parts, len(tensor.sha256), "sha256")
    if tensor.offset + parts * tensor.slab_bytes > size:
        _wrong(f"a tensor that ends within the {size:,} bytes of its file", f"{tensor.offset:,}", "offset")


def _check_target(name: str, target: Target, plan: Plan, weights: Weights) -> None:
    _same("its platform, kind, topology and TP", f"{target.text}-tp{target.tp}".replace(":", "-"), name)
    mesh = target.mesh
    if len(set(mesh.devices)) != len(mesh.devices):
        _wrong("every device once", _short(mesh.devices), "mesh", "devices")
    if len(mesh.hosts) != target.tp or set(mesh.hosts) != set(range(target.processes)):
        _wrong(f"for each of {target.tp} devices its host, counted from 0", _short(mesh.hosts), "mesh", "hosts")
    with _at("state"):
        _check_state(target, plan)
    geometry = {"tp": target.tp, "dtype": plan.dtype}
    geometry |= {key: getattr(target.state, key) for key in ("slots", "pages", "page_size", "max_pages", "placement")}
    for key, value in geometry.items():
        if key in target.geometry:
            _same("as the target's mesh, state and plan say", value, target.geometry[key], "geometry", key)
    if "form" in target.geometry:
        striped = target.geometry["form"] == "tiles" and target.tp > 1
        placement = "striped" if striped else "replicated"
        _same("as the geometry's form and TP say", placement, target.state.placement, "state", "placement")
    for at, parameter in enumerate(target.parameters):
        with _at("parameters", at):
            stored = weights.index.get(parameter.tensor)
            if stored is None:
                raise WrongRecordError("a tensor of the weight index", shown(parameter.tensor), ("tensor",))
            _same("as the weight index says", stored.shape, parameter.shape, "shape")
            _same("as the weight index says", BY_CODE[stored.dtype].name, parameter.dtype, "dtype")
            if (parameter.index is None) != (parameter.axis is None):
                _wrong("`index` and `axis` together, or neither", "one of them")
            if parameter.axis is not None and not (
                parameter.axis < len(parameter.shape) and (parameter.index or 0) < parameter.shape[parameter.axis]
            ):
                _wrong(f"an index within {_short(parameter.shape)}", f"{parameter.index} of axis {parameter.axis}")
    for cell_name, cell in target.cells.items():
        with _at("cells", cell_name):
            _check_cell(cell_name, cell, target, plan)
    _check_cells(target, plan)


def _check_state(target: Target, plan: Plan) -> None:
    state = target.state
    _same("as the plan says", plan.max_running, state.slots, "slots")
    _same("as the plan says", plan.page_size, state.page_size, "page_size")
    _same("what the plan's context needs", -(-plan.context // plan.page_size), state.max_pages, "max_pages")
    dummies = 1 if state.placement == "replicated" else target.tp
    sizes = {"slots": state.slots + 1, "pages": state.pages + dummies, "page": state.page_size}
    for at, array in enumerate(state.arrays):
        with _at("arrays", at):
            _same("a word for each axis", len(array.shape), len(array.axes), "axes")
            for word, size in zip(array.axes, array.shape, strict=True):
                if word in sizes:
                    _same(f"the size of the axis `{word}`", sizes[word], size, "shape")


def _check_cell(name: str, cell: Cell, target: Target, plan: Plan) -> None:
    if CellName.fullmatch(name) is None or name != cell.name:
        _wrong(f"its phase and padding, {cell.name}", shown(name))
    paddings = {"prefill": plan.paddings, "decode": plan.decode_paddings}.get(cell.phase)
    if paddings is not None and cell.padding not in paddings:
        _wrong(f"one of the plan's paddings {_short(paddings)}", str(cell.padding), "padding")
    if cell.phase in ("prefill", "score") and cell.padding % target.state.chunk:
        _wrong(f"a multiple of the chunk, {target.state.chunk}", str(cell.padding), "padding")
    if (cell.exec is None) != (cell.call is None):
        _wrong("`exec` and `call` together, or neither", "one of them")
    _check_fields(cell, target.state)
    by_group = {group: [leaf for leaf in cell.inputs if leaf.group == group] for group in ("params", "state", "batch")}
    if [leaf for group in by_group.values() for leaf in group] != list(cell.inputs):
        _wrong("parameters, then state, then batch", "another order", "inputs")
    _check_leaves(cell, by_group, target)
    if cell.call is not None:
        donated = [each.donated for each in cell.call.inputs]
        _same("the state donated", [leaf.group == "state" for leaf in cell.inputs], donated, "call", "inputs")
        for side, rows in (("inputs", cell.inputs), ("outputs", cell.outputs)):
            called = [(each.shape, each.dtype) for each in getattr(cell.call, side)]
            if called != [(each.shape, each.dtype) for each in rows]:
                _wrong(f"the {len(rows)} {side} of the cell", f"{len(called)}, or others", "call", side)


def _check_fields(cell: Cell, state: State) -> None:
    offset = 0
    for at, field in enumerate(cell.fields):
        with _at("fields", at):
            _same("where the field before it ends", offset, field.offset, "offset")
            rows = cell.padding if field.name in ROW_FIELDS else cell.padding // state.chunk
            if field.name == "page_table":
                rows = cell.padding if cell.phase == "decode" else rows
                _same("the page table's shape", (rows, state.max_pages), field.shape, "shape")
            else:
                _same("the field's shape", (rows,), field.shape, "shape")
            offset += field.size


def _check_leaves(cell: Cell, by_group: dict[str, list[Leaf]], target: Target) -> None:
    batch = {leaf.name: leaf for leaf in by_group["batch"]}
    wanted = {"logits", "packed"} if cell.phase == "sample" else {"packed"}
    _same("the batch of the phase", sorted(wanted), sorted(batch), "inputs")
    _same("the packed fields", ((cell.packed,), "int32"), (batch["packed"].shape, batch["packed"].dtype), "inputs")
    state = sorted(target.state.arrays, key=lambda array: array.name)
    outputs = [leaf for leaf in cell.outputs if leaf.group == "state"]
    used = {leaf.name for leaf in by_group["state"]}  # ``sample`` has the last tokens alone
    wanted_state = [_kind(array) for array in state if cell.phase != "sample" or array.name in used]
    for side, leaves in (("inputs", by_group["state"]), ("outputs", outputs)):
        _same("the target's state arrays", wanted_state, list(map(_kind, leaves)), side)
    arguments = {parameter.argument: parameter for parameter in target.parameters}
    for leaf in by_group["params"]:
        parameter = arguments.get(leaf.name)
        if parameter is None:
            raise WrongRecordError("a parameter of the target", shown(leaf.name), ("inputs",))
        shape = parameter.shape
        if parameter.axis is not None:
            shape = shape[: parameter.axis] + shape[parameter.axis + 1 :]
        _same(f"parameter {shown(leaf.name)}", (shape, parameter.dtype), (leaf.shape, leaf.dtype), "inputs")
    results = {leaf.name: leaf for leaf in cell.outputs if leaf.group == "out"}
    _same("state, then results", len(outputs) + len(results), len(cell.outputs), "outputs")
    rows = {"prefill": cell.padding // target.state.chunk, "score": cell.padding // target.state.chunk}
    shapes = {"logits": rows.get(cell.phase, cell.padding), "token": cell.padding, "logprob": cell.padding}
    shapes["best"] = cell.padding
    names = {"sample": {"token", "logprob"}, "score": {"logits", "logprob", "best"}}.get(cell.phase, {"logits"})
    if missing := sorted(names - results.keys()):
        _wrong(f"the result {listed(missing)}", _short(sorted(results)), "outputs")
    for name in names:
        _same(f"the rows of {name}", shapes[name], results[name].shape[0], "outputs")


def _kind(array: Leaf | StateArray) -> tuple[object, ...]:
    return array.name, array.shape, array.dtype, array.spec


def _check_cells(target: Target, plan: Plan) -> None:
    """Every padding of the plan, and a ``sample`` for all rows that the other cells give."""
    for phase, paddings in (("prefill", plan.paddings), ("decode", plan.decode_paddings)):
        _same(f"the plan's {phase} paddings", paddings, target.paddings(phase), "cells")
    rows = {cell.rows for cell in target.cells.values() if cell.phase != "sample"}
    if missing := sorted(rows - set(target.paddings("sample"))):
        _wrong(f"a program sample@{missing[0]}, for as many rows of logits", "none", "cells")


def _check_vectors(vectors: Vectors, manifest: Manifest, vocabulary: object) -> None:
    assert isinstance(vocabulary, int)
    for at, sequence in enumerate(vectors.sequences):
        with _at("sequences", at):
            if not sequence.ids or max(sequence.ids) >= vocabulary:
                _wrong(f"token ids below {vocabulary}", _short(sequence.ids), "ids")
            if not 1 <= sequence.prompt <= len(sequence.ids):
                _wrong(f"1 to {len(sequence.ids)} tokens", str(sequence.prompt), "prompt")
            ascending = sequence.positions == tuple(sorted(set(sequence.positions)))
            if not ascending or not sequence.positions or sequence.positions[-1] >= len(sequence.ids):
                _wrong(f"ascending positions below {len(sequence.ids)}", _short(sequence.positions), "positions")
    for name, receipts in vectors.receipts.items():
        cells = manifest.targets[name].cells if name in manifest.targets else {}
        if unknown := sorted(receipts.cells.keys() - cells.keys()):
            _wrong("receipts of cells that there are", shown(unknown[0]), "receipts", name)

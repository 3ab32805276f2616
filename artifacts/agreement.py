"""Whether a manifest's numbers agree: with each other, and with the sizes of the files that they describe.

Types and bounds of single fields are in `schema`. A manifest that passes can be loaded without further checks. A pool
has the rows that its state arrays have. A field ends where the next begins. Every program takes the parameters and the
state of its target.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby, zip_longest
from typing import NoReturn

from msgspec import structs

from ling3export.artifacts.parameters import Parameter, Tensor
from ling3export.artifacts.program_records import Array, Leaf
from ling3export.artifacts.records import WrongRecordError
from ling3export.artifacts.schema import Cell, Manifest, PlanRecord, Target, Vectors
from ling3export.foundation.errors import shown
from ling3export.foundation.phases import GIVERS, PHASES, ArraySpec, PhaseSpec


def check_agreement(manifest: Manifest) -> None:
    """Compares what a manifest says in several places.

    Raises:
        WrongRecordError: Two places contradict each other; says where, what follows from the one, and what was found.
    """
    vocabulary, ends = manifest.config.get("vocab_size"), manifest.config.get("eos_token_id")
    with _at("config"):
        if type(vocabulary) is not int or vocabulary < 1:
            _wrong("a positive `vocab_size`", vocabulary)
        if not isinstance(ends, tuple) or any(token >= vocabulary for token in ends):
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
            _check_target(target, manifest.plan, vocabulary)
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


def _wrong(expected: str, actual: object, *path: object) -> NoReturn:
    raise WrongRecordError(expected, _short(actual), path)


def _same(what: str, expected: object, actual: object, *path: object) -> None:
    if expected != actual:
        _wrong(f"{_short(expected)}, {what}", actual, *path)


def _same_each(what: str, expected: Iterable[object], actual: Iterable[object], *path: object) -> None:
    """Compares lists, and shows the first pair that differs; its number takes the place of the braces in ``what``."""
    for at, (one, other) in enumerate(zip_longest(expected, actual)):
        _same(what.format(at), one, other, *path)


def _short(value: object) -> str:
    return shown(sorted(value) if isinstance(value, (set, frozenset)) else value)


def _check_tensor(tensor: Tensor, size: int) -> None:
    _same("one digest a shard", tensor.parts, len(tensor.sha256), "sha256")
    if tensor.offset + tensor.nbytes > size:
        _wrong(f"a tensor that ends within the {size:,} bytes of its file", tensor.offset, "offset")


def _check_target(target: Target, plan: PlanRecord, vocabulary: int) -> None:
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
    for where, values in (("state", structs.asdict(state)), ("geometry", geometry)):
        for name, (fact, source) in ((fact_name, facts[fact_name]) for fact_name in facts if fact_name in values):
            _same(source, fact, values[name], where, name)
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
    words = Words(target, plan.dtype, vocabulary)
    for name, cell in target.cells.items():
        with _at("cells", name):
            _same("its phase and padding", cell.name, name)
            _check_cell(cell, target, words)
    with _at("cells"):
        _check_paddings(target, plan)


class Words:
    """The sizes and dtypes that a target gives the words of the phases' records.

    A word whose size nothing else in the manifest states takes it from the first program, and has it in all others.
    """

    def __init__(self, target: Target, dtype: str, vocabulary: int) -> None:
        self.sizes = {"max_pages": target.state.max_pages, "vocab": vocabulary}
        for array in target.state.arrays:
            self.sizes |= {f"{array.name}.{axis}": size for axis, size in zip(array.axes, array.shape, strict=True)}
        int8 = target.geometry.get("token_dtype") == "int8"
        self.sizes |= {"int8": 1} if int8 else {}
        self._dtypes = {"model": dtype, "token": "int8" if int8 else dtype, "sent": "uint8" if int8 else dtype}
        self._striped = target.state.placement == "striped"

    def check(self, rows: Mapping[str, ArraySpec], leaves: Sequence[Leaf], side: str) -> None:
        """Compares the arrays of a program with those of its phase."""
        rows = {name: row for name, row in rows.items() if row.exists(self.sizes)}
        _same("as the phase has", sorted(rows), sorted(leaf.name for leaf in leaves), side)
        for leaf in leaves:
            row = rows[leaf.name]
            _same(f"the axes of {leaf.name}", len(row.axes), len(leaf.shape), side)
            for axis, size in zip(row.axes, leaf.shape, strict=True):
                self.sizes.setdefault(str(axis), size)
            expected = row.shape(self.sizes), self._dtypes.get(row.dtype, row.dtype), row.spec(striped=self._striped)
            _same(f"the array {leaf.name}", expected, (leaf.shape, leaf.dtype, leaf.spec), side)


def _check_paddings(target: Target, plan: PlanRecord) -> None:
    """Every phase that the target's features need has its programs, and no other phase has any."""
    features = {feature for cell in target.cells.values() for feature in PHASES[cell.phase].needs} - {"snapshots"}
    features |= {"snapshots"} if target.state.snapshots else set()
    paddings: dict[str, tuple[int, ...]] = {"prefill": plan.paddings, "decode": plan.decode_paddings}
    paddings["rows"] = tuple(sorted({cell.rows for cell in target.cells.values() if cell.phase in GIVERS}))
    for phase, record in PHASES.items():
        actual = target.paddings(phase)
        if not features.issuperset(record.needs):
            _same(f"the paddings of {phase}", (), actual)
            continue
        expected = paddings.setdefault(record.sizes, actual)
        if record.sizes in ("slots", "pages"):
            _same(f"how many {phase} programs there are", 1, len(actual))
        _same(f"the paddings of {phase}", expected, actual)


def _check_parameter(parameter: Parameter, tensors: Mapping[str, Tensor]) -> None:
    if not tensors:  # programs alone
        return
    if (stored := tensors.get(parameter.tensor)) is None:
        _wrong("a tensor of the weight index", parameter.tensor, "tensor")
    shape, axis = stored.shape, parameter.stack_axis
    if parameter.layer is not None:
        if axis >= len(shape) or parameter.layer >= shape[axis]:
            _wrong(f"a layer within axis {axis} of {_short(shape)}", parameter.layer, "layer")
        shape = (*shape[:axis], *shape[axis + 1 :])
    _same("as the weight index says", (shape, stored.dtype), (parameter.shape, parameter.dtype), "shape")
    _same("whether the tensor has shards", stored.shards > 0, parameter.split is not None, "split")


def _check_cell(cell: Cell, target: Target, words: Words) -> None:
    record, chunk = PHASES[cell.phase], target.state.chunk
    if record.chunked and cell.padding % chunk:
        _wrong(f"a multiple of the chunk, {chunk}", cell.padding, "padding")
    if record.sizes == "pages" and target.state.placement == "striped" and cell.padding % target.tp:
        _wrong(f"a multiple of {target.tp}, over which pages are striped", cell.padding, "padding")
    words.sizes |= {"padding": cell.padding, "chunks": cell.padding // chunk}
    _same("the fields of the phase", list(record.fields), [field.name for field in cell.fields], "fields")
    offset = 0
    for at, (field, row) in enumerate(zip(cell.fields, record.fields.values(), strict=True)):
        _same("where the field before it ends", offset, field.offset, "fields", at, "offset")
        _same("the shape of the field", row.shape(words.sizes), field.shape, "fields", at, "shape")
        _same("the dtype of the field", row.dtype, field.dtype, "fields", at, "dtype")
        offset += field.size
    for side, leaves, order in (
        ("inputs", cell.inputs, ("params", "state", "batch")),
        ("outputs", cell.outputs, ("state", "out")),
    ):
        groups = [group for group, _ in groupby(leaves, key=lambda leaf: leaf.group)]
        _same("each group once and in this order", [group for group in order if group in groups], groups, side)
        arrays = sorted((array for array in target.state.arrays if record.takes_state(array.name)), key=_name)
        state = [_array(leaf) for leaf in leaves if leaf.group == "state"]
        _same_each("the target's state array {}", map(_array, arrays), state, side)
    _check_params([leaf for leaf in cell.inputs if leaf.group == "params"], target, record)
    packed = {"packed": ArraySpec("int32", (offset,), ("",))} if record.fields else {}
    words.check({**record.batch, **packed}, [leaf for leaf in cell.inputs if leaf.group == "batch"], "inputs")
    words.check(record.out, [leaf for leaf in cell.outputs if leaf.group == "out"], "outputs")
    if (cell.exec is None) != (cell.call is None):
        _wrong("`exec` and `call` together, or neither", "only call" if cell.exec is None else "only exec")
    if cell.call is not None:
        donated = [value.donated for value in cell.call.inputs]
        _same_each(
            "whether input {} is state, which is donated",
            [leaf.group == "state" for leaf in cell.inputs], donated, "call", "inputs",
        )  # fmt: skip
        _same_each("input {} of the cell", _kinds(cell.inputs), _kinds(cell.call.inputs), "call", "inputs")
        _same_each("output {} of the cell", _kinds(cell.outputs), _kinds(cell.call.outputs), "call", "outputs")


def _check_params(leaves: Sequence[Leaf], target: Target, record: PhaseSpec) -> None:
    parameters = {row.name: row for row in target.parameters if record.takes_parameter(row.name)}
    _same("the parameters of the phase", sorted(parameters), sorted(leaf.name for leaf in leaves), "inputs")
    for leaf in leaves:
        row = parameters[leaf.name]
        _same(f"parameter {shown(leaf.name)}", (row.shape, row.dtype), (leaf.shape, leaf.dtype), "inputs")


def _name(array: Array) -> str:
    return array.name


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
    for where, measured in (("receipts", vectors.receipts), ("portable", vectors.portable or {})):
        for name, receipts in measured.items():
            cells = targets[name].cells if name in targets else {}
            named = {*receipts.cells, *getattr(receipts, "lacking", ())}
            if unknown := sorted(named - cells.keys()):
                _wrong("receipts of cells that there are", unknown[0], where, name)

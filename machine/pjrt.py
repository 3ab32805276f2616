"""Compiled programs as files: PJRT's own bytes, and a record of how to call them. Never pickle.

``service.py``, ``portable.py`` and this alone use jax's internals (tried with jax 0.10.2, 0.11.2 and 0.12.0).
Beside an executable jax keeps the shapes, dtypes and shardings of its inputs and outputs, and which inputs the program
dropped. ``serialized`` writes those down, and ``load_executable`` gives them back to the classes that
``jit(f).lower(…).compile()`` ends in. So jax calls a loaded program as it calls a compiled one, with the same checks,
the same fast path and the same donation, and traces nothing.

The record is an ``Executable`` of `artifacts.schema`. Its inputs stand in jax's flattening order of ``(args, kwargs)``,
its outputs in that of the result.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import core, stages
from jax._src.interpreters import pxla
from jax._src.lax import linalg
from jax._src.lib import xla_client
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ling3export.artifacts.program_records import Array, CallInput, CallRecord
from ling3export.artifacts.schema import Executable
from ling3export.artifacts.schema import Mesh as MeshRecord
from ling3export.foundation.errors import ArtifactError, listed
from ling3export.machine.environment import requirements
from ling3export.machine.verdict import executable_fits

Program = Callable[..., list[jax.Array]]  # flat inputs → flat outputs

TRACED = "/jax/core/compile/jaxpr_trace_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"

_events: Counter[str] = Counter()  # what jax reported in this process since this module was imported
_lock = threading.Lock()
_cache_off = 0


def _count(event: str, *_: Any, **__: Any) -> None:
    with _lock:
        _events[event] += 1


jax.monitoring.register_event_listener(_count)
jax.monitoring.register_event_duration_secs_listener(_count)


def serialized(compiled: stages.Compiled) -> tuple[bytes, Executable]:
    """``compiled`` for a file: its executable in PJRT's serialization, and the record for ``load_executable``.

    Both the compiling and this call have to stand within ``no_compilation_cache()``: PJRT serializes an executable that
    came from the persistent cache without its machine code, so that it loads in this process and fails in every other.

    Raises:
        ValueError: The cache is on. Or the program holds what a file cannot: constants in device memory, callbacks,
            effects, refs or layouts of its own. Or its shardings are not all on one mesh of one axis.
    """
    _check_self_contained(compiled)
    if not _cache_off:
        raise ValueError("executable `bytes`: expected to be called within no_compilation_cache(), found the cache on")
    shardings = jax.tree.leaves(compiled.input_shardings, is_leaf=lambda leaf: leaf is None)
    inputs, _ = jax.tree.flatten_with_path(compiled.args_info)
    outputs, _ = jax.tree.flatten_with_path(compiled.out_info)
    mesh = _mesh([*shardings, *(info.sharding for _, info in outputs)], compiled)
    call = CallRecord(
        tuple(
            CallInput(*_array(path, info.shape, info.dtype, sharding), bool(info.donated), sharding is not None)
            for (path, info), sharding in zip(inputs, shardings, strict=True)
        ),
        tuple(Array(*_array(path, info.shape, info.dtype, info.sharding)) for path, info in outputs),
        tuple(sorted(set(re.findall(r'custom_call_target="([^"]+)"', compiled.as_text() or "")))),
    )
    executable: Any = compiled.runtime_executable()
    raw, devices = executable.serialize(), list(mesh.devices.flat)
    ids, hosts = [device.id for device in devices], [device.process_index for device in devices]
    record = MeshRecord(str(mesh.axis_names[0]), tuple(ids), tuple(hosts))
    return raw, Executable(requirements(devices, raw), record, call)


def _parts(compiled: stages.Compiled) -> Any:
    """The UnloadedMeshExecutable that jit's executables keep."""
    return compiled._executable._unloaded_executable  # type: ignore[attr-defined]


def _check_self_contained(compiled: stages.Compiled) -> None:
    unloaded = _parts(compiled)
    dependencies = {
        "constants that are arguments": compiled._params.const_args,
        "host callbacks": [*unloaded.host_callbacks, *unloaded.keepalive],
        "effects": [*unloaded.ordered_effects, *unloaded.unordered_effects],
        "mutable refs": [] if unloaded.mut is None else [*unloaded.mut.in_mut],
        "input layouts": [layout for layout in unloaded.dispatch_in_layouts if layout is not None],
    }
    if wrong := [what for what, values in dependencies.items() if values]:
        raise ValueError(f"executable `{unloaded.name}`: expected only arrays in and out, found {listed(wrong)}")


def _mesh(shardings: Sequence[Sharding | None], compiled: stages.Compiled) -> Mesh:
    """The one mesh of all shardings; on one device, where jax drops it, a mesh ``('tp',)`` of that device."""
    meshes: set[Any] = {sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)}
    devices = tuple(_parts(compiled).device_list)
    if not meshes and len(devices) == 1:
        return Mesh(np.array(devices), ("tp",), axis_types=(AxisType.Auto,))
    if len(meshes) != 1 or tuple((mesh := meshes.pop()).devices.flat) != devices:
        raise ValueError(f"shardings: expected all on one mesh over {len(devices)} devices, found {len(meshes)} meshes")
    if len(mesh.axis_names) != 1:
        raise ValueError(f"mesh: expected one axis, found {mesh.axis_names}")
    return mesh


def _array(
    path: Any, shape: Sequence[int], dtype: Any, sharding: Sharding | None
) -> tuple[str, tuple[int, ...], str, tuple[Any, ...]]:
    """Name, shape, dtype and spec."""
    name = jax.tree_util.keystr(path)
    spec: list[Any] = []
    if isinstance(sharding, NamedSharding):
        spec = list(sharding.spec)
        while spec and not spec[-1]:
            spec.pop()
    elif sharding is not None and not sharding.is_fully_replicated:
        raise ValueError(f"sharding of `{name}`: expected a NamedSharding, found {sharding}; give jit out_shardings")
    return name, tuple(shape), np.dtype(dtype).name, tuple(spec)


def recorded_mesh(record: MeshRecord) -> Mesh:
    """The mesh of ``record``: over the devices with the recorded ids where they all exist, else over the first ones."""
    devices = {device.id: device for device in jax.devices()}
    ids = record.devices if set(record.devices) <= devices.keys() else list(devices)[: len(record.devices)]
    return Mesh(np.array([devices[number] for number in ids]), (record.axis,), axis_types=(AxisType.Auto,))


def load_executable(raw: bytes, record: Executable) -> Program:
    """The program that ``serialized`` gave: ``f(*flat inputs) -> [flat outputs]``.

    Nothing is traced, compiled or unpickled. Inputs are jax.Arrays with the recorded shardings on the recorded mesh
    (jax refuses others by the input's name); a call deletes the donated ones. Outputs have the recorded NamedShardings
    on it. The caller checks digests before: damaged bytes may kill the process.

    Raises:
        ArtifactError: The executable does not fit here.
        ValueError: On cpu: it takes or gives other arrays than are recorded.
    """
    if reason := executable_fits(record.requires, record.mesh):
        raise ArtifactError(f"executable: {reason}", hint="compile the portable program on this machine instead")
    if any(target.startswith("lapack_") for target in record.call.custom_calls):
        linalg.initialize_lapack()  # tracing a LAPACK routine does this; without it the first call is a segfault
    mesh = recorded_mesh(record.mesh)
    devices = tuple(mesh.devices.flat)
    device_list = xla_client.DeviceList(devices)
    client = devices[0].client
    executable = client.deserialize_executable(raw, executable_devices=device_list)
    if client.platform == "cpu":  # elsewhere this was not tried
        _compare(executable, record.call, mesh)
    return _program(executable, device_list, client, record.call, mesh)


def _compare(executable: Any, call: CallRecord, mesh: Mesh) -> None:
    """Refuses an executable whose inputs or outputs on a device are not those of ``call``: to call it may end us."""
    module = executable.hlo_modules()[0].as_serialized_hlo_module_proto()
    own = xla_client.XlaComputation(module).program_shape()
    result = own.result_shape()
    sides = {
        "inputs": ([row for row in call.inputs if row.kept], own.parameter_shapes()),
        "outputs": (call.outputs, result.tuple_shapes() if result.is_tuple() else [result]),
    }
    for side, (rows, shapes) in sides.items():
        if len(shapes) != len(rows):
            raise ValueError(f"{len(shapes)} {side} in place of {len(rows)}")
        for row, shape in zip(rows, shapes, strict=True):
            wanted = NamedSharding(mesh, PartitionSpec(*row.spec)).shard_shape(tuple(row.shape))
            expected, actual = f"{row.dtype} {wanted}", f"{shape.numpy_dtype().name} {tuple(shape.dimensions())}"
            if actual != expected:
                raise ValueError(f"{actual} on a device in place of {expected} as `{row.name}` of its {side}")


def _program(executable: Any, device_list: Any, client: Any, call: CallRecord, mesh: Mesh) -> Program:
    def avals(arrays: Sequence[Array]) -> list[core.ShapedArray]:
        return [core.ShapedArray(array.shape, jax.numpy.dtype(array.dtype)) for array in arrays]

    def shardings(arrays: Sequence[Array]) -> list[NamedSharding]:
        return [NamedSharding(mesh, PartitionSpec(*array.spec)) for array in arrays]

    inputs, outputs = call.inputs, call.outputs
    kept = [array for array in inputs if array.kept]
    names = tuple(array.name for array in inputs)
    debug_info = core.DebugInfo("load_executable", "program", names, tuple(array.name for array in outputs))
    loaded = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=device_list,
        backend=client,
        input_avals=avals(kept),
        input_shardings=shardings(kept),
        output_avals=avals(outputs),
        output_shardings=shardings(outputs),
        committed=True,
        name="program",
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx={index for index, array in enumerate(inputs) if array.kept},
        mut=None,
        xla_in_layouts=[None] * len(kept),
        dispatch_in_layouts=[None] * len(kept),
        xla_out_layouts=[None] * len(outputs),
        all_args_info=pxla.AllArgsInfo(avals(inputs), debug_info),
        pgle_profiler=None,
    ).load()
    arguments = tuple(stages.ArgInfo(aval, a.donated) for aval, a in zip(avals(inputs), inputs, strict=True))
    result = jax.tree.structure([0] * len(outputs))
    compiled = stages.Compiled(loaded, [], (arguments, {}), result, no_kwargs=True)
    program = loaded.create_cpp_call(compiled._params)
    if program is None:
        raise ArtifactError("executable: this jax gives no fast call path", hint="report this with jax's version")
    return program


class CompileCounter:
    """Counts the programs that jax compiles in this process, in any thread, from now on."""

    def __init__(self) -> None:
        self._before = Counter(_events)

    @property
    def count(self) -> int:
        """Programs that the backend compiled, or that came from the persistent cache instead."""
        return _events[COMPILED] - self._before[COMPILED]

    @property
    def traces(self) -> int:
        """Python functions that jax traced, the inner ones of a program too."""
        return _events[TRACED] - self._before[TRACED]

    @property
    def cache_hits(self) -> int:
        """Programs that came from the persistent cache."""
        return _events[CACHE_HIT] - self._before[CACHE_HIT]


@contextmanager
def no_compilation_cache() -> Iterator[CompileCounter]:
    """Has jax compile everything within anew, for executables that are to be saved; yields a counter.

    jax's persistent cache is off meanwhile, for the whole process, and what jax remembers of earlier compiles, which
    may have come from it, is dropped. The cache's folder is taken out of the configuration too, because the compiler
    writes it into the executable.

    Raises:
        RuntimeError: At the end, if a program came from the cache all the same.
    """
    global _cache_off
    enabled, folder = jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # jax looks at its configuration only once
    jax.clear_caches()
    counter = CompileCounter()
    _cache_off += 1
    try:
        yield counter
    finally:
        _cache_off -= 1
        jax.config.update("jax_enable_compilation_cache", enabled)
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
    if counter.cache_hits:
        raise RuntimeError(f"compilation cache: expected it off, found {counter.cache_hits} programs taken from it")

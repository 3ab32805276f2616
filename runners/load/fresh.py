"""The state at a start: zeros, in memory that programs write in place."""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ling3export.artifacts.files import REBUILD
from ling3export.artifacts.program_records import CallRecord
from ling3export.artifacts.schema import Executable, FileRecord, Target
from ling3export.foundation.errors import ArtifactError
from ling3export.machine import pjrt, untouched
from ling3export.machine.environment import memory
from ling3export.machine.verdict import executable_fits

# XLA:CPU uses host memory in place if it is aligned to 64 bytes. 8 is aligned for every dtype and never for XLA.
MISALIGNED = 8
Fresh = Callable[[], dict[str, jax.Array]]


def state_source(read: Mapping[FileRecord, bytes], target: Target, mesh: Mesh) -> Fresh:
    """A function that gives every state array, zeros, whenever it is called.

    Where the target has a state program that fits this machine, memory is taken when it is first touched. Otherwise all
    of it is written.

    Args:
        read: The bytes of the target's files that hold native code, of right digests.

    Raises:
        ArtifactError: The program does not load, or gives other arrays than the manifest says; or the target is for the
            processor, and its state is larger than the memory that is free.
    """
    if target.platform == "cpu":
        _check_memory(target)
    if target.state_program is None or executable_fits(target.requires, target.mesh) is not None:
        return partial(_written, target, mesh)
    raw = read[target.state_program]
    untouched.register()
    call = CallRecord((), target.state.arrays, (untouched.NAME,))
    try:
        program = pjrt.load_executable(raw, Executable(target.requires, target.mesh, call))
    except (RuntimeError, ValueError) as error:
        what = f"program `{target.state_program.path}`: expected an executable that gives the state, found {error}"
        raise ArtifactError(what, REBUILD) from error
    return partial(_untouched, target, program)


def _check_memory(target: Target) -> None:
    """Refuses a state for which memory would run out later, in the middle of a request."""
    needed, (_, available, swap) = target.state_bytes * target.tp // target.processes, memory()
    if 0 < available + swap < needed:
        raise ArtifactError(
            f"state: expected {needed / 1e9:.2f} GB of memory for it, found {(available + swap) / 1e9:.2f} GB",
            "build for fewer sequences: a smaller --max-running, --context or --state-memory",
        )


def _untouched(target: Target, program: pjrt.Program) -> dict[str, jax.Array]:
    """The arrays of ``program``, which was compared with the manifest, as zeros, without writing them."""
    arrays = jax.block_until_ready(program())
    for shard in (part.data for array in arrays for part in array.addressable_shards):
        untouched.zero(shard.unsafe_buffer_pointer(), shard.nbytes)
    return {row.name: array for row, array in zip(target.state.arrays, arrays, strict=True)}


def _written(target: Target, mesh: Mesh) -> dict[str, jax.Array]:
    return {
        row.name: fresh_zeros(row.shape, row.dtype, NamedSharding(mesh, PartitionSpec(*row.spec)))
        for row in target.state.arrays
    }


def fresh_zeros(shape: Sequence[int], dtype: jnp.dtype | str, sharding: Sharding) -> jax.Array:
    """Zeros in memory of their own, so that donating them reuses it; costs a write of each device's shard.

    Makes as many shards at a time as there are cores: most of the time goes into taking new memory from the kernel.

    jax would alias numpy memory, which a program cannot write to: donation would then copy on every first use, in
    silence (``may_alias=False`` is ignored for numpy arrays). So the zeros come from one misaligned block, mapped and
    never written to, thus without memory.

    Raises:
        RuntimeError: This jaxlib uses misaligned memory in place, too.
    """
    shape, dtype = tuple(shape), jnp.dtype(dtype)
    shard = sharding.shard_shape(shape)
    count = int(np.prod(shard, dtype=np.int64))
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # read only and private: every page is the kernel's one zero page
    block = mmap.mmap(-1, MISALIGNED + max(1, count * dtype.itemsize), flags=flags, prot=mmap.PROT_READ)
    zeros = np.frombuffer(block, dtype, count, MISALIGNED).reshape(shard)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        shards = list(pool.map(lambda device: jax.device_put(zeros, device), sharding.addressable_devices))
    array = jax.make_array_from_single_device_arrays(shape, sharding, shards)
    first = array.addressable_shards[0].data
    if count and jax.default_backend() == "cpu" and first.unsafe_buffer_pointer() == zeros.ctypes.data:
        raise RuntimeError(f"zeros: expected a copy of misaligned memory, found it used by jaxlib {jaxlib.__version__}")
    return array

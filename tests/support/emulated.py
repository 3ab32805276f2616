"""Runs kernels of other processors in an emulator: this gives their numbers, not their speed.

A build for such a processor makes the library. A small program under ``qemu-user`` (``emulated.cc``) loads it and calls
one kernel as XLA would; :func:`calling` replaces XLA's own calls with it, outside of ``jit``.
"""

import math
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
import pytest

from ling3export.compile.kernels import compiled
from ling3export.plan import kernels
from ling3export.plan.kernels import Level

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = "apt-get install g++-aarch64-linux-gnu qemu-user"
# By level, a processor of qemu that has only the features of that level.
PROCESSORS = {"neon_dotprod": "neoverse-n1", "neon": "cortex-a72"}
LEVELS = [level for level in kernels.LEVELS if level.machines == kernels.ARM]
# Numbers of dtypes in XLA's foreign function interface.
TYPES = {"int8": 2, "int32": 4, "uint8": 6, "uint16": 7, "float32": 11, "bfloat16": 16}
LIMIT = 600  # seconds for a call


def _numbers(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


def _array(value: Any) -> bytes:
    """Type, shape and size of an array."""
    size = math.prod(value.shape) * value.dtype.itemsize
    return _numbers(TYPES[value.dtype.name], len(value.shape), *value.shape, size)


def _request(arguments: Sequence[np.ndarray], out: Sequence[Any], aliases: dict[int, int], attributes: Any) -> bytes:
    taken = {result: argument for argument, result in aliases.items()}
    parts = [_numbers(len(arguments)), *(_array(each) + each.tobytes() for each in arguments), _numbers(len(out))]
    parts += [_array(each) + _numbers(taken.get(i, -1)) for i, each in enumerate(out)]
    parts.append(_numbers(len(attributes)))
    for name, value in sorted(attributes.items()):
        bits = int(value.view(np.int32))
        parts.append(_numbers(len(name)) + name.encode() + _numbers(TYPES[value.dtype.name], bits))
    return b"".join(parts)


@contextmanager
def calling(level: Level, name: str, folder: Path) -> Iterator[None]:
    """Calls kernels whose names end in ``name`` in an emulator; its program is compiled in ``folder``."""
    if not shutil.which(COMPILER) or not shutil.which(EMULATOR):
        pytest.skip(f"no {COMPILER} or {EMULATOR}: {PACKAGES}")
    library, program = folder / "kernels.so", folder / "emulated"
    library.write_bytes(compiled([COMPILER], level))
    source = Path(__file__).with_suffix(".cc")
    subprocess.run(
        [COMPILER, "-std=c++17", "-O1", "-pthread", "-I", jax.ffi.include_dir(), source, "-o", program], check=True
    )
    emulator = [EMULATOR, "-cpu", PROCESSORS[level.name], "-L", "/usr/aarch64-linux-gnu", program, library]
    true_call = jax.ffi.ffi_call

    def ffi_call(target: str, out: Any, *, input_output_aliases: dict[int, int] | None = None) -> Callable[..., Any]:
        symbol, _, ending = target.partition(".")
        if ending != name:
            return true_call(target, out, input_output_aliases=input_output_aliases)
        leaves, shape = jax.tree.flatten(out)

        def call(*arguments: Any, **attributes: Any) -> Any:
            own = [np.asarray(jnp.asarray(each)) for each in arguments]
            request = _request(own, leaves, input_output_aliases or {}, attributes)
            command = [*emulator, symbol]
            done = subprocess.run(command, input=request, capture_output=True, timeout=LIMIT)
            if done.returncode == -signal.SIGSEGV:
                # qemu-user 7.2 crashed once (2026-11-27), and not in three further runs of the same request. A kernel
                # that reads past its buffers crashes both times.
                done = subprocess.run(command, input=request, capture_output=True, timeout=LIMIT)
            if done.returncode:
                raise jax.errors.JaxRuntimeError(f"exit code {done.returncode}: {done.stderr.decode()}")
            found, at = [], 0
            for each in leaves:
                count = math.prod(each.shape)
                found.append(jnp.asarray(np.frombuffer(done.stdout, each.dtype, count, at).reshape(each.shape)))
                at += count * each.dtype.itemsize
            return jax.tree.unflatten(shape, found)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.ffi, "ffi_call", ffi_call)
        yield

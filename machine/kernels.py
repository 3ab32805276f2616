"""Registers a target's native kernels with XLA, before any executable that calls them is deserialized."""

import ctypes
import os
import threading

from ling3export.artifacts.schema import KERNELS
from ling3export.foundation.errors import ArtifactError

# The names that a library exports, each with ``ling3_`` before it.
HANDLERS = (
    *("columns", "rows", "experts", "route", "token", "attention", "best"),
    *(f"{name}_{form}" for name in ("columns", "rows", "experts") for form in ("int8", "int4", "code4")),
    "columns_code6",
)
LIBRARIES: dict[str, ctypes.CDLL] = {}  # by the end of the names: XLA takes a name once a process, and calls it later
_lock = threading.Lock()


def register(library: bytes, ending: str) -> None:
    """Makes the kernels in ``library`` known to XLA under names that end in ``ending``; those it knows stay.

    The bytes are loaded from memory: a file could change between its check and here. That memory's descriptor stays
    open, for a second library that got its number would have its name, and the loader would give the first one again.

    Raises:
        ArtifactError: They are no library with these kernels that this machine can load.
    """
    import jax

    with _lock:
        if ending in LIBRARIES:
            return
        descriptor = os.memfd_create(KERNELS, os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(library)
            loaded = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
            symbols = {name: getattr(loaded, f"ling3_{name}") for name in HANDLERS}
        except (OSError, AttributeError) as error:
            os.close(descriptor)
            raise ArtifactError(
                f"native kernels: expected a library that loads, found: {error}",
                "build the artifact on this machine, or compile the portable programs here: --programs allow-compile",
            ) from error
        for name, symbol in symbols.items():
            jax.ffi.register_ffi_target(f"ling3_{name}.{ending}", jax.ffi.pycapsule(symbol), platform="cpu")
        LIBRARIES[ending] = loaded

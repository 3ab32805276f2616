"""Memory on the processor that reads as zeros and is taken only where it is touched.

PJRT writes in place only into buffers of its own, and gives those from a program alone. So there is a program that does
nothing but call a handler, which writes nothing; the kernel then takes the pages of the buffers back, and gives zeros
for each that is touched.
"""

import ctypes
import mmap
from functools import cache

NAME = "ling3_untouched"  # of the handler, as the program calls it
METADATA = 1  # XLA_FFI_Extension_Metadata
DONTNEED = 4  # MADV_DONTNEED


class _Version(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("ext", ctypes.c_void_p), ("major", ctypes.c_int), ("minor", ctypes.c_int))


class _Api(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("ext", ctypes.c_void_p), ("version", _Version))


class _Metadata(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("version", _Version))


class _Extension(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _Frame(ctypes.Structure):  # the beginning of XLA_FFI_CallFrame, in xla/ffi/api/c_api.h
    _fields_ = (("size", ctypes.c_size_t), ("ext", ctypes.POINTER(_Extension)), ("api", ctypes.POINTER(_Api)))


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Frame))
def _handler(frame: "ctypes._Pointer[_Frame]") -> None:
    """Says that it is of the runtime's version when it is asked; writes nothing, and never fails."""
    call = frame.contents
    if call.ext and call.ext.contents.kind == METADATA:
        version, runtime = call.ext.contents.metadata.contents.version, call.api.contents.version
        version.major, version.minor = runtime.major, runtime.minor


@cache
def register() -> None:
    """Makes the handler known to XLA, before a program that calls it is compiled or deserialized."""
    import jax

    capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
        ("PyCapsule_New", ctypes.pythonapi)
    )
    jax.ffi.register_ffi_target(NAME, capsule(ctypes.cast(_handler, ctypes.c_void_p), None, None), platform="cpu")


def zero(start: int, size: int) -> None:
    """Makes ``size`` bytes from the address ``start`` on zeros: whole pages by giving them back, the rest by writing.

    Where the kernel keeps a page (one that is locked, say), all is written.
    """
    stop = start + size
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    ends = [(start, stop)]
    if first < last:
        ctypes.memset(last - 1, 1, 1)  # where the pages are not replaced, this byte stays
        if _madvise(first, last - first, DONTNEED) == 0 and ctypes.string_at(last - 1, 1) == b"\0":
            ends = [(start, first), (last, stop)]
    for begin, end in ends:
        ctypes.memset(begin, 0, end - begin)


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

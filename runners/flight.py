"""The flight record: what this process is doing in native code, in memory that outlives a crash.

A crash in compiled code or in a deserializer ends the process without running any Python, and so does SIGKILL. So a
command writes beforehand what it is about to load or run, into memory that a small second process shares. That one
waits for the first to be gone. If nobody said that this was meant, it prints what stands in the record, as the last
line on stderr. docs/decisions/0006-flight-record.md says why it is made so.

The record is one for the process, as faulthandler's is. It holds the target, what is being loaded, the number of
program calls and the names of the last ones. Where no command watches, writing it goes nowhere and costs the same.

This file is also the second process's program, so it imports nothing of ours.
"""

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

_NAME = 64  # bytes of a name, filled with zeros
_CALLS = 4  # how many calls have their names kept
_COUNT = struct.Struct("<Q")
_RING = _COUNT.size
_TARGET = _RING + _CALLS * _NAME
_LOADING = _TARGET + _NAME
_SIZE = 4096
# A signal of these to a whole group of processes ends the first one, and not its witness.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PATIENCE = 60.0  # seconds: a start takes seconds, so what takes longer may hang
_MEANT = b"."  # told to the second process: the end that follows is meant

_memory = mmap.mmap(-1, _SIZE)
_calls = 0
_journal: "list[bytes] | None" = None
_loading: list[str] = []
_lock = threading.Lock()
_watcher: "subprocess.Popen[bytes] | None" = None


def name_of(text: str) -> bytes:
    """``text`` as the record holds it: made once, since ``called`` has to be quick."""
    return text.encode()[:_NAME].ljust(_NAME, b"\0")


def target(text: str) -> None:
    """Writes the target that is loaded from now on."""
    _memory[_TARGET : _TARGET + _NAME] = name_of(text)


def called(name: bytes) -> None:
    """Writes that a program is called now; about a microsecond.

    Args:
        name: What ``name_of`` gave for the program.
    """
    global _calls
    if _journal is not None:
        _journal.append(name)
    at = _RING + _calls % _CALLS * _NAME
    _memory[at : at + _NAME] = name
    _calls += 1
    _COUNT.pack_into(_memory, 0, _calls)


@contextmanager
def journal() -> Iterator[list[str]]:
    """Keeps the names of all programs that are called within the block; they are in the list behind it."""
    global _journal
    names: list[str] = []
    _journal = []
    try:
        yield names
    finally:
        names += [_text(name) for name in _journal]
        _journal = None


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Writes what is being loaded, as long as the block runs; blocks of several threads stand beside each other."""
    with _lock:
        _loading.append(what)
        _write_loading()
    try:
        yield
    finally:
        with _lock:
            _loading.remove(what)
            _write_loading()


def _write_loading() -> None:
    room = _SIZE - _LOADING
    _memory[_LOADING:] = ", ".join(_loading).encode()[:room].ljust(room, b"\0")


@contextmanager
def starting(patience: float = PATIENCE) -> Iterator[None]:
    """Writes Python's stacks of all threads to stderr, once, should the block take longer than ``patience`` seconds.

    Where no command watches, nothing is written: the process may use faulthandler's one timer otherwise.
    """
    if _watcher is None:
        yield
        return
    faulthandler.dump_traceback_later(patience, file=2)  # a thread without Python: native code may hold the interpreter
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def watched() -> Iterator[None]:
    """Has a second process tell on stderr what this one did last, should it crash or be killed within the block.

    Python's stacks of all threads come before that line, where the signal allows it (faulthandler).
    """
    global _memory, _watcher
    if not faulthandler.is_enabled():
        faulthandler.enable(2)
    shared = os.memfd_create("ling3-flight")
    os.truncate(shared, _SIZE)
    _memory = mmap.mmap(shared, _SIZE)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # which the second process inherits
    try:
        _watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(shared), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(shared,),
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(shared)
    try:
        yield
    finally:
        landed()


def landed() -> None:
    """Ends the second process in silence: whatever ends this one now is meant. May be called again."""
    global _watcher
    watcher, _watcher = _watcher, None
    if watcher is not None:
        watcher.communicate(_MEANT)


def leave(code: int) -> NoReturn:
    """Ends this process at once, without tidying up: for threads that say themselves why.

    It does not wait until the second process has ended, since another thread could raise an error in that time.
    """
    if _watcher is not None and _watcher.stdin is not None:
        with contextlib.suppress(OSError, ValueError):  # another thread has ended it already
            os.write(_watcher.stdin.fileno(), _MEANT)
    os._exit(code)


def record() -> bytes:
    """What this process has written."""
    return _memory[:]


def last_words(record: bytes, process: str) -> str:
    """What a record says of the process that wrote it."""
    (calls,) = _COUNT.unpack_from(record)
    names = [_text(record[_RING + n % _CALLS * _NAME :][:_NAME]) for n in range(max(0, calls - _CALLS), calls)]
    loading, where = _text(record[_LOADING:]), _text(record[_TARGET:_LOADING])
    if names:
        before = f", behind {', '.join(names[:-1])}" if names[1:] else ""
        doing = f"; the last program that it started is {names[-1]} of {where}, call {calls}{before}"
        doing += f", while it loaded {loading}" if loading else ""
    elif loading:
        doing = f" while {where or 'the artifact'} was loaded: {loading}"
    else:
        doing = " before it loaded anything"
    return f"error: process {process}: expected it to end by itself, found it crashed or killed{doing}"


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def _watch(shared: int, process: str) -> None:
    """The second process: waits until the first is gone, and says what it did last unless it was told not to."""
    if os.read(0, 1) != _MEANT:
        os.write(2, (last_words(os.pread(shared, _SIZE, 0), process) + "\n").encode())


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])

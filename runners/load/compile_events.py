"""Counting what jax compiles, and compiling without its persistent cache."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

TRACED = "/jax/core/compile/jaxpr_trace_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"

_events: Counter[str] = Counter()
_lock = threading.Lock()
_listening = False
_cache_off = 0


class CompileCounter:
    """What jax has compiled in this process, in any thread, since the counter was made."""

    def __init__(self) -> None:
        _listen()
        self._before = Counter(_events)

    @property
    def count(self) -> int:
        """Programs handed to the backend's compiler, or fetched from the persistent cache instead."""
        return _events[COMPILED] - self._before[COMPILED]

    @property
    def traces(self) -> int:
        """Python functions traced, the inner ones of a program too."""
        return _events[TRACED] - self._before[TRACED]

    @property
    def cache_hits(self) -> int:
        """Programs fetched from the persistent cache."""
        return _events[CACHE_HIT] - self._before[CACHE_HIT]


def compile_events() -> CompileCounter:
    """A counter that starts at zero now; jax's listeners are registered once a process, with the first."""
    return CompileCounter()


def _listen() -> None:
    global _listening
    with _lock:
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_count_duration)
            jax.monitoring.register_event_listener(_count)
            _listening = True


def _count(event: str, **_: Any) -> None:
    with _lock:
        _events[event] += 1


def _count_duration(event: str, duration_secs: float, **_: Any) -> None:
    _count(event)


def cache_is_off() -> bool:
    """Whether this is within ``no_compilation_cache()``."""
    return _cache_off > 0


@contextmanager
def no_compilation_cache() -> Iterator[CompileCounter]:
    """Compiles everything within anew, for executables that are to be saved; yields a counter.

    Turns jax's persistent cache off for the whole process, and drops what jax remembers of earlier compiles, which may
    have come from it. The cache's directory is taken out of the configuration too: the compiler writes it into the
    executable.

    Raises:
        RuntimeError: at the end, if a program came from the cache all the same.
    """
    global _cache_off
    enabled, folder = jax.config.jax_enable_compilation_cache, jax.config.jax_compilation_cache_dir
    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # jax looks at its configuration only once
    jax.clear_caches()
    counter = compile_events()
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

"""The cache's second level, inside of a compiling process: a lowered program that was compiled before is not again.

It answers where the first level cannot: sources of the model changed, what they lower to did not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ling3export.artifacts.manifest import sha256_of
from ling3export.cache.store import Cache

Compiled = tuple[bytes, dict[str, Any]]  # executable, manifest fields
COMPILED, PROGRAM, CELL = "compiler", "program cache", "cache"


class Programs:
    """Compiled programs by what the compiler was given.

    Args:
        job: ``folder``, ``reads`` and ``writes`` of the cache; None to use none.

    Attributes:
        messages: What the build's user is to be told.
        origin: Of the last program: ``from`` (``compiler`` or ``program cache``) and its key, ``program``.
    """

    def __init__(self, job: dict[str, Any] | None) -> None:
        self.messages: list[str] = []
        self.origin: dict[str, Any] = {}
        self._cache: Cache | None = None
        if job is not None:
            folder = Path(job["folder"])
            self._cache = Cache(folder, self.messages.append, reads=job["reads"], writes=job["writes"])

    def compiled(self, fields: dict[str, Any], compile_it: Callable[[], Compiled]) -> Compiled:
        """The program of ``fields``: its original bytes from the cache, or compiled now and then kept."""
        key = sha256_of(fields)
        entry = None if self._cache is None else self._cache.read("programs", key)
        self.origin = {"from": COMPILED if entry is None else PROGRAM, "program": key}
        if entry is not None:
            return entry.data["exec"], entry.record
        raw, record = compile_it()
        if self._cache is not None:
            self._cache.write("programs", fields, record, {"exec": raw})
        return raw, record

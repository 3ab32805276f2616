"""The two levels of the cache: cells, looked up by the build, and compiled programs, looked up by its workers.

A cell whose fields are known is neither traced nor compiled. Where sources of the model changed and what they lower to
did not, the second level answers: the lowered program was compiled before and is not compiled again.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import try_writing, writing
from ling3export.artifacts.manifest import sha256_of
from ling3export.cache.explain import explain
from ling3export.cache.keys import cell_fields
from ling3export.cache.store import KINDS, Cache, Entry, Say, entries
from ling3export.cache.use import CacheUse, lease
from ling3export.model.config import Config
from ling3export.plan.plan import Cell, Plan

SUFFIXES = ("stablehlo", "exec")
COMPILED, PROGRAM, CELL = "compiler", "program cache", "cache"  # where a program came from


@dataclass(frozen=True)
class Program:
    """What a compiling process made of a lowered program, or found in the cache.

    Attributes:
        data: The serialized executable.
        record: The manifest fields that describe it.
        origin: ``from`` (COMPILED or PROGRAM), and the program's key, ``program``.
    """

    data: bytes
    record: dict[str, Any]
    origin: dict[str, str]


def compiled_program(
    cache: Cache, fields: dict[str, Any], compile_it: Callable[[], tuple[bytes, dict[str, Any]]]
) -> Program:
    """The program of ``fields``: its original bytes from the cache, or compiled now and then kept."""
    key = sha256_of(fields)
    if entry := cache.read("programs", key):
        return Program(entry.data["exec"], entry.record, {"from": PROGRAM, "program": key})
    data, record = compile_it()
    cache.write("programs", fields, record, {"exec": data})
    return Program(data, record, {"from": COMPILED, "program": key})


class Cells:
    """What a build takes from the cache, and gives to it.

    Args:
        use: How.
        say: Told of misses (with ``explain``), broken entries and failed writes.

    Attributes:
        use: The same; ``use.writes`` says whether the next build finds what this one makes.
    """

    def __init__(self, use: CacheUse, say: Say) -> None:
        self.use, self._say = use, say
        self._cache = Cache.of(use, say)
        # Before this build adds its own: those would explain nothing.
        self._known: list[Entry] = list(entries(use.where, "cells")) if use.explain else []

    def fetch(self, config: Config, plan: Plan, cell: Cell, folder: Path) -> dict[str, Any] | None:
        """Puts a cell's files into ``folder`` and returns its record; None if they have to be made.

        Raises:
            ArtifactError: ``folder`` cannot be written.
        """
        fields = cell_fields(config, plan, cell)
        key = sha256_of(fields)
        entry = self._cache.read("cells", key)
        if self.use.explain:
            self._say(f"{plan.target.name} {cell.name}: {self._why(fields, entry)}")
        if entry is None:
            return None
        for suffix in SUFFIXES:
            path = folder / f"{cell.name}.{suffix}"
            with writing(path, len(entry.data[suffix])):
                path.write_bytes(entry.data[suffix])
        origin = {"from": CELL, "key": key, "program": entry.record["origin"]["program"], "traces": 0, "compiles": 0}
        return entry.record | {"origin": origin}

    def keep(self, config: Config, plan: Plan, cell: Cell, folder: Path, record: dict[str, Any]) -> dict[str, Any]:
        """Keeps what a compiling process has just put into ``folder``; returns the record with its key."""
        fields = cell_fields(config, plan, cell)
        whole = record | {"origin": {**record["origin"], "key": sha256_of(fields)}}
        if self.use.writes:
            data = {suffix: (folder / f"{cell.name}.{suffix}").read_bytes() for suffix in SUFFIXES}
            self._cache.write("cells", fields, whole, data)
        return whole

    def say(self, messages: list[str]) -> None:
        """Passes on what a compiling process had to tell."""
        for message in messages:
            self._say(message)

    def _why(self, fields: dict[str, Any], entry: Entry | None) -> str:
        if entry is not None:
            return "from the cache"
        if not self.use.reads:
            return f"made anew: --cache {self.use.policy}"
        return f"not in the cache: {explain(fields, self._known)}"


@contextlib.contextmanager
def opened(use: CacheUse, say: Say) -> Iterator[Cells]:
    """The cache for one build; what it uses within the block is not removed by a clean-up.

    A folder that cannot be written is named once, and the build goes on with what is in it.
    """
    use = _writable(use, say)
    with lease(use.where) if use.writes else contextlib.nullcontext():
        yield Cells(use, say)


def _writable(use: CacheUse, say: Say) -> CacheUse:
    """``use``, without writing if the folder does not allow it."""
    folder = use.where
    if not use.writes:
        return use
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, *(folder / name for name in (*KINDS, "blobs"))):
            if place.exists():
                try_writing(place)
    except OSError as error:
        say(
            f"not cached: cache `{folder.name}`: expected a folder that can be written, found {error.strerror}, "
            f"in {folder.parent}"
        )
        return replace(use, policy="readonly" if use.reads else "off")
    return use


def counts(targets: dict[str, Any]) -> dict[str, int]:
    """Where the cells of a manifest's targets came from, and what jax traced and compiled for them."""
    origins = [cell["origin"] for target in targets.values() for cell in target["cells"].values() if "origin" in cell]
    return {
        "cells": len(origins),
        "compiled": sum(origin["from"] == COMPILED for origin in origins),
        "from_program_cache": sum(origin["from"] == PROGRAM for origin in origins),
        "from_cache": sum(origin["from"] == CELL for origin in origins),
        "traces": sum(origin["traces"] for origin in origins),
        "compiles": sum(origin["compiles"] for origin in origins),
    }


def summary(targets: dict[str, Any], use: CacheUse) -> str:
    """A line for the user: ``cells: 0 compiled, 10 from the cache (on, /home/…); jax traced 0 and compiled 0``."""
    found = counts(targets)
    again = found["from_program_cache"]
    traced = f", {again} traced again to a program from the cache" if again else ""
    where = f"{use.policy}" if use.policy == "off" else f"{use.policy}, {use.where}"
    return (
        f"cells: {found['compiled']} compiled{traced}, {found['from_cache']} from the cache ({where}); "
        f"jax traced {found['traces']} functions and compiled {found['compiles']} programs"
    )

"""The two levels of the cache, as a build uses them.

A cell with the same sources, options and versions is taken whole: it is neither traced nor compiled. Where sources
changed and the lowered program did not, the compiling process (``compile/worker.py``) finds the program at the second
level, and does not compile it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from ling3export.artifacts.files import refuse_links, remove, try_writing, write_new, writing
from ling3export.artifacts.program_records import Origin, Program
from ling3export.artifacts.records import Record, from_json, sha256_of, to_json
from ling3export.artifacts.schema import GRAPH, Mesh, Requirements
from ling3export.cache.keys import cell_fields
from ling3export.cache.store import KINDS, LARGEST_ENTRY, Cache, CacheEntry, CacheUse, Report
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.reading import read_bytes
from ling3export.model.config import Config
from ling3export.plan.plan import Plan, PlannedCell

SUFFIXES = ("stablehlo", "exec", GRAPH)
COMPILED, PROGRAM, CELL = "compiler", "program cache", "cache"  # where a program came from


def graph_key(program: str) -> str:
    """The key of an optimized program's text, from the key of the program."""
    return sha256_of({"graph": program})


class Built(Record, frozen=True):
    """A cell that was built or taken from the cache: its manifest record, and the machine that it needs."""

    program: Program
    requires: Requirements
    mesh: Mesh


class Cells:
    """The cells that a build takes from the cache and gives to it; ``report`` as of ``Cache``."""

    def __init__(self, use: CacheUse, report: Report) -> None:
        self.use, self.report = use, report
        self._cache = Cache(use, report)

    def fetch(self, config: Config, plan: Plan, cell: PlannedCell, folder: Path) -> Built | None:
        """Puts a cell's files into ``folder`` and returns the cell; None if it has to be made."""
        key = sha256_of(cell_fields(config, plan, cell))
        entry = self._cache.read("cells", key, _built)
        if entry is None:
            return None
        built, program = _built(entry)
        executable, text = (self._cache.read("programs", key) for key in (program, graph_key(program)))
        if executable is None or text is None:
            return None
        for suffix, data in zip(SUFFIXES, (entry.data, executable.data, text.data), strict=True):
            write_new(folder / f"{cell.name}.{suffix}", data)
        return _from(built, Origin(CELL, program, 0, 0, key))

    def keep(self, config: Config, plan: Plan, cell: PlannedCell, folder: Path, built: Built) -> Built:
        """Keeps a cell whose program a compiling process has just kept; returns it with its key."""
        fields = cell_fields(config, plan, cell)
        assert built.program.origin is not None
        whole = _from(built, structs.replace(built.program.origin, key=sha256_of(fields)))
        if self.use.writes:
            portable = read_bytes(folder, f"{cell.name}.stablehlo", LARGEST_ENTRY)
            self._cache.write("cells", fields, to_json(whole), portable)
        return whole

    def forget(self, programs: Iterable[Program]) -> None:
        """Removes programs whose receipts failed: the next build makes them again."""
        for origin in (program.origin for program in programs if self.use.writes and program.origin is not None):
            keys = ("cells", origin.key), ("programs", origin.program), ("programs", graph_key(origin.program))
            for kind, key in keys:
                if key is not None:
                    remove(self._cache.path(kind, key))

    def file(self, fields: dict[str, Any], make: Callable[[], bytes]) -> bytes:
        """Another file of a target: from the cache, or made now and kept under its ``fields``."""
        if entry := self._cache.read("programs", sha256_of(fields)):
            return entry.data
        made = make()
        self._cache.write("programs", fields, {}, made)
        return made


def opened(use: CacheUse, report: Report) -> Cells:
    """The cache for one build. A folder that cannot be written is reported once, and is then only read."""
    folder = use.where
    try:
        if use.writes:
            refuse_links(folder, KINDS)
            with writing(folder):
                for place in (folder, *(folder / kind for kind in KINDS)):
                    place.mkdir(parents=True, exist_ok=True)
                    try_writing(place)
        return Cells(use, report)
    except ArtifactError as error:
        report(f"not cached: {error.message}")
        return Cells(replace(use, policy="readonly" if use.reads else "off"), report)


def _built(entry: CacheEntry) -> tuple[Built, str]:
    """The cell of an entry, and the key of its program; a ValueError if no build wrote the entry."""
    built = from_json(Built, entry.record)
    if built.program.origin is None:
        raise ValueError("a cell without its origin")
    return built, built.program.origin.program


def _from(built: Built, origin: Origin) -> Built:
    return structs.replace(built, program=structs.replace(built.program, origin=origin))


def counts(programs: Iterable[Program]) -> dict[str, int]:
    """The number of programs by their source, and how much jax traced and compiled for them."""
    origins = [program.origin for program in programs if program.origin is not None]
    return {
        "cells": len(origins),
        "compiled": sum(origin.source == COMPILED for origin in origins),
        "from_program_cache": sum(origin.source == PROGRAM for origin in origins),
        "from_cache": sum(origin.source == CELL for origin in origins),
        "traces": sum(origin.traces for origin in origins),
        "compiles": sum(origin.compiles for origin in origins),
    }


def summary(programs: Iterable[Program], use: CacheUse) -> str:
    """A line for the user: ``cells: 0 compiled, 10 from the cache (on, /home/…); jax traced 0 and compiled 0``."""
    count = counts(programs)
    again = count["from_program_cache"]
    traced = f", {again} traced again to a program from the cache" if again else ""
    where = use.policy if use.policy == "off" else f"{use.policy}, {use.where}"
    return (
        f"cells: {count['compiled']} compiled{traced}, {count['from_cache']} from the cache ({where}); "
        f"jax traced {count['traces']} functions and compiled {count['compiles']} programs"
    )

"""What a build takes from the cache and gives to it: whole cells, which are then neither traced nor compiled.

Where sources of the model changed and what they lower to did not, a second level answers, in the compiling process
(``compile/worker.py``): the lowered program was compiled before and is not compiled again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ling3export.artifacts.files import refuse_links, remove, try_writing, write_new
from ling3export.artifacts.program_records import Origin, Program
from ling3export.artifacts.records import sha256_of, to_json
from ling3export.artifacts.schema import Mesh, Requirements
from ling3export.cache.explain import explain
from ling3export.cache.keys import cell_fields
from ling3export.cache.store import KINDS, LARGEST_BLOB, Cache, CacheEntry, Say, entries, record_of
from ling3export.cache.use import CacheUse
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.reading import read_bytes
from ling3export.model.config import Config
from ling3export.plan.plan import Plan, PlannedCell

SUFFIXES = ("stablehlo", "exec")
COMPILED, PROGRAM, CELL = "compiler", "program cache", "cache"  # where a program came from


@dataclass(frozen=True)
class Built:
    """A cell that was built or taken from the cache, and what its executable needs.

    Attributes:
        program: What the manifest says of it.
        requires: Of a machine.
        mesh: The devices.
    """

    program: Program
    requires: Requirements
    mesh: Mesh


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
        self._cache = Cache(use, say)
        # Before this build adds its own: those would explain nothing.
        self._known: list[CacheEntry] = list(entries(use.where, "cells")) if use.explain else []

    def fetch(self, config: Config, plan: Plan, cell: PlannedCell, folder: Path) -> Built | None:
        """Puts a cell's files into ``folder`` and returns what was built; None if they have to be made.

        Raises:
            ArtifactError: ``folder`` cannot be written.
        """
        fields = cell_fields(config, plan, cell)
        key = sha256_of(fields)
        entry = self._cache.read("cells", key, _built)
        if self.use.explain:
            self._say(f"{plan.target.name} {cell.name}: {self._why(fields, entry)}")
        if entry is None:
            return None
        for suffix in SUFFIXES:
            write_new(folder / f"{cell.name}.{suffix}", entry.data[suffix])
        built, program = _built(entry)
        return _from(built, Origin(CELL, program, 0, 0, key))

    def keep(self, config: Config, plan: Plan, cell: PlannedCell, folder: Path, built: Built) -> Built:
        """Keeps what a compiling process has just put into ``folder``; returns it with its key."""
        fields = cell_fields(config, plan, cell)
        assert built.program.origin is not None
        whole = _from(built, replace(built.program.origin, key=sha256_of(fields)))
        if self.use.writes:
            data = {suffix: read_bytes(folder, f"{cell.name}.{suffix}", LARGEST_BLOB) for suffix in SUFFIXES}
            self._cache.write("cells", fields, to_json(whole), data)
        return whole

    def forget(self, programs: Iterable[Program]) -> None:
        """Removes what this build took or made and receipts refused: the next build makes it again."""
        for origin in (program.origin for program in programs if self.use.writes and program.origin is not None):
            for kind, key in (("cells", origin.key), ("programs", origin.program)):
                if key is not None:
                    remove(self._cache.path(kind, key))

    def file(self, kind: str, fields: dict[str, Any], make: Callable[[], bytes]) -> bytes:
        """A file of a target beside those of its cells, ``so`` or ``exec``: from the cache, or made now and kept.

        Args:
            kind: The end of its name.
            fields: Everything that decides it.
            make: Makes it.
        """
        if entry := self._cache.read("programs", sha256_of(fields), lambda entry: entry.data[kind]):
            return entry.data[kind]
        made = make()
        self._cache.write("programs", fields, {}, {kind: made})
        return made

    def say(self, messages: list[str]) -> None:
        """Passes on what a compiling process had to tell."""
        for message in messages:
            self._say(message)

    def _why(self, fields: dict[str, Any], entry: CacheEntry | None) -> str:
        if entry is not None:
            return "from the cache"
        if not self.use.reads:
            return f"made anew: --cache {self.use.policy}"
        return f"not in the cache: {explain(fields, self._known)}"


def opened(use: CacheUse, say: Say) -> Cells:
    """The cache for one build.

    A folder that cannot be written is named once, and the build goes on with what is in it.
    """
    return Cells(_writable(use, say), say)


def _writable(use: CacheUse, say: Say) -> CacheUse:
    """``use``, without writing if the folder does not allow it."""
    folder = use.where
    if not use.writes:
        return use
    try:
        refuse_links(folder, (*KINDS, "blobs"))
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, *(folder / name for name in (*KINDS, "blobs"))):
            if place.exists():
                try_writing(place)
    except OSError as error:
        say(
            f"not cached: cache `{folder.name}`: expected a folder that can be written, found {error.strerror}, "
            f"in {folder.parent}"
        )
    except ArtifactError as error:
        say(f"not cached: {error.message}")
    else:
        return use
    return replace(use, policy="readonly" if use.reads else "off")


def _built(entry: CacheEntry) -> tuple[Built, str]:
    """What an entry of a cell says was built, and the key of its program.

    Raises:
        ValueError: The entry is none that a build wrote. The error's text follows "found".
    """
    built = record_of(entry, Built, SUFFIXES)
    if built.program.origin is None:
        raise ValueError("a cell without its origin")
    return built, built.program.origin.program


def _from(built: Built, origin: Origin) -> Built:
    return replace(built, program=replace(built.program, origin=origin))


def counts(programs: Iterable[Program]) -> dict[str, int]:
    """Where programs came from, and what jax traced and compiled for them."""
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
    found = counts(programs)
    again = found["from_program_cache"]
    traced = f", {again} traced again to a program from the cache" if again else ""
    where = f"{use.policy}" if use.policy == "off" else f"{use.policy}, {use.where}"
    return (
        f"cells: {found['compiled']} compiled{traced}, {found['from_cache']} from the cache ({where}); "
        f"jax traced {found['traces']} functions and compiled {found['compiles']} programs"
    )

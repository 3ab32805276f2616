"""RECOMPILE: portable programs compiled on this machine, and kept in the user's cache, never with the artifact.

They are native code that no digest of an artifact covers: nothing that came with one is taken, and nothing from a
folder in which others can write. ``recompiled/`` holds ``KEY.json`` and ``KEY.exec`` for each program. KEY is a digest
of the portable program's own digest and of everything that decides what the compiler makes of it here. The JSON file
holds the executable's digest and a digest of itself; a program whose files do not match them is compiled again. Files
appear by rename, the JSON last, so that parallel runners and kills leave no half-written entry.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.artifacts.files import RECOMPILED, replace_file, user_cache, writing
from ling3export.artifacts.manifest import file_record, read_checked
from ling3export.artifacts.records import canonical, from_json, sha256_of, to_json
from ling3export.artifacts.schema import Cell, Executable, FileRecord, Target
from ling3export.foundation.errors import ArtifactError
from ling3export.foundation.reading import shared_with
from ling3export.foundation.strict_json import read_json
from ling3export.machine.environment import toolchain
from ling3export.machine.verdict import Verdict, executable_fits

if TYPE_CHECKING:
    from jax.sharding import Mesh

Compiled = tuple[bytes, Executable]  # the bytes of an executable, and how it is called


def cache_folder() -> Path:
    """The folder that keeps what runners of this user compiled."""
    return user_cache() / RECOMPILED


def compile_here(
    artifact: Path, target: Target, cells: Sequence[Verdict], mesh: "Mesh", say: Callable[[str], None]
) -> dict[str, Compiled]:
    """Executables of ``cells`` for this machine, by cell: from the cache, or compiled now and cached.

    Raises:
        ArtifactError: A portable program is damaged, or this jax cannot read or compile it.
    """
    from ling3export.machine.pjrt import no_compilation_cache

    folder, done = cache_folder(), count(1)
    blobs = {verdict.cell: read_checked(artifact, target.cells[verdict.cell].stablehlo) for verdict in cells}

    def ready(verdict: Verdict) -> Compiled:
        why = f"{verdict.cell}: {verdict.status.value} ({verdict.reason})"
        key = cache_key(target.cells[verdict.cell].stablehlo.sha256, mesh)
        if (kept := _lookup(folder, key, say)) is not None:
            say(f"{why}: from {folder.name}")
            next(done)
            return kept
        say(f"{why}: compiling")
        begun = time.perf_counter()
        result = _compile(target.cells[verdict.cell], blobs[verdict.cell], mesh)
        say(f"{verdict.cell}: compiled in {time.perf_counter() - begun:.1f} s ({next(done)} of {len(cells)} programs)")
        store_program(folder, key, result, say)
        return result

    # An executable that came from jax's own persistent cache cannot be saved.
    with no_compilation_cache(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(zip(blobs, pool.map(ready, cells), strict=True))


def _compile(cell: Cell, blob: bytes, mesh: "Mesh") -> Compiled:
    import jax

    from ling3export.machine.pjrt import serialized
    from ling3export.machine.portable import compile_portable

    try:
        compiled = compile_portable(blob, cell, mesh)
    except Exception as error:
        raise ArtifactError(
            f"program `{cell.name}`: expected portable StableHLO that jax {jax.__version__} compiles, "
            f"found {type(error).__name__}: {error}",
            "build the artifact again with this version of jax, or install the one it was built with",
        ) from error
    return serialized(compiled)


def cache_key(stablehlo: str, mesh: "Mesh") -> str:
    """A digest of everything that an executable depends on: portable program, toolchain, processor and devices."""
    devices = list(mesh.devices.flat)
    return sha256_of(
        {
            "stablehlo": stablehlo,
            "toolchain": toolchain(),
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "devices": [device.id for device in devices],
            "axes": list(mesh.axis_names),
            "processes": len({device.process_index for device in devices}),
        }
    )


def _lookup(folder: Path, key: str, say: Callable[[str], None]) -> Compiled | None:
    path = folder / f"{key}.json"
    if not os.path.lexists(path):
        return None
    try:
        _check_owner(folder)
        entry = read_json(path)
        if entry.pop("sha256") != sha256_of(entry):
            raise ValueError("another digest")
        file, executable = from_json(FileRecord, entry["exec"]), from_json(Executable, entry["executable"])
        if file.path != f"{key}.exec":
            raise ValueError("another program's name")
        raw = read_checked(folder, file)
        if misfit := executable_fits(executable.requires, executable.mesh):
            raise ValueError(misfit)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArtifactError) as error:
        say(f"cache entry {key[:12]}: expected a whole one, found {error}; compiling it again")
        return None
    return raw, executable


def _check_owner(folder: Path) -> None:
    """Refuses a folder in which another user can put what would run here."""
    if others := shared_with(folder):
        raise ArtifactError(f"cache `{folder.name}`: expected a folder that this user alone can write, found {others}")


def store_program(folder: Path, key: str, result: Compiled, say: Callable[[str], None]) -> None:
    """Puts a program into the cache, and says why where it cannot."""
    raw, executable = result
    try:
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        _check_owner(folder)
        replace_file(folder / f"{key}.exec", raw)
        entry = {"exec": to_json(file_record(folder, f"{key}.exec")), "executable": to_json(executable)}
        replace_file(folder / f"{key}.json", canonical({**entry, "sha256": sha256_of(entry)}))
    except ArtifactError as error:
        say(f"not cached: {error.message}")

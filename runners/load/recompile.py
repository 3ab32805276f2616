"""RECOMPILE: portable programs compiled on this machine, and kept beside the artifact, never in it.

``NAME.ling3.cache/`` holds, per program, ``KEY.json`` and ``KEY.exec``. KEY is the digest of the portable program's
own digest and of everything that decides what the compiler makes of it here. The JSON file names the executable's
digest and carries its own; an entry that does not match is compiled again. Files appear by rename, the JSON last, so
parallel runners and kills leave nothing half-written that counts.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.artifacts.files import replace_file, writing
from ling3export.artifacts.manifest import file_record, read_checked
from ling3export.artifacts.records import canonical, from_json, sha256_of, to_json
from ling3export.artifacts.schema import Executable, FileRecord, Target
from ling3export.errors import ArtifactError
from ling3export.runners.load.environment import toolchain
from ling3export.runners.load.verdict import Verdict, executable_fits
from ling3export.strict_json import read_json

if TYPE_CHECKING:
    from jax.sharding import Mesh

Compiled = tuple[bytes, Executable]  # its bytes, and how to load them


def cache_folder(artifact: Path) -> Path:
    """Beside the artifact."""
    artifact = artifact.resolve()
    return artifact.with_name(f"{artifact.name}.cache")


def compile_here(
    artifact: Path, target: Target, cells: Sequence[Verdict], portable: Callable[[str], bytes], mesh: "Mesh",
    say: Callable[[str], None],
) -> dict[str, Compiled]:  # fmt: skip
    """Executables of ``cells`` for this machine, from the cache or compiled now.

    Args:
        artifact: Its folder; the cache lies beside it.
        target: The manifest's.
        cells: What to compile, and why.
        portable: Reads the portable program of a cell by its digest.
        mesh: What to compile for.
        say: Told of every cell: what was done, and why.

    Raises:
        ArtifactError: A portable program is damaged, or this jax cannot read or compile it.
    """
    folder = cache_folder(artifact)
    out, missing = {}, []
    for verdict in cells:
        key = cache_key(target.cells[verdict.cell].stablehlo.sha256, mesh)
        hit = _lookup(folder, key, say)
        if hit is None:
            missing.append((verdict, key))
        else:
            out[verdict.cell] = hit
            say(f"{verdict.cell}: RECOMPILE ({verdict.reason}): from {folder.name}")
    if missing:
        out.update(_compile_all(folder, missing, portable, mesh, say))
    return out


def _compile_all(
    folder: Path, missing: list[tuple[Verdict, str]], portable: Callable[[str], bytes], mesh: "Mesh",
    say: Callable[[str], None],
) -> dict[str, Compiled]:  # fmt: skip
    from ling3export.runners.load.pjrt import no_compilation_cache

    blobs = {verdict.cell: portable(verdict.cell) for verdict, _ in missing}  # every digest before any compiling

    def work(verdict: Verdict, key: str) -> tuple[str, Compiled]:
        say(f"{verdict.cell}: RECOMPILE ({verdict.reason}): compiling")
        result = _compile(verdict.cell, blobs[verdict.cell], mesh)
        _store(folder, key, result, say)
        return verdict.cell, result

    # An executable that came from jax's own persistent cache cannot be saved.
    with no_compilation_cache(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return dict(pool.map(lambda item: work(*item), missing))


def _compile(cell: str, blob: bytes, mesh: "Mesh") -> Compiled:
    import jax
    from jax import export

    from ling3export.runners.load.pjrt import call_record, executable_bytes

    try:
        exported = export.deserialize(bytearray(blob))
        flat = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for aval, sharding in zip(exported.in_avals, exported.in_shardings_jax(mesh), strict=True)
        ]
        arguments, _ = jax.tree.unflatten(exported.in_tree, flat)
        # jax.export forgets donation: the state is the second argument of every program.
        compiled = jax.jit(exported.call, donate_argnums=(1,)).lower(*arguments).compile()
    except Exception as error:
        raise ArtifactError(
            f"program `{cell}`: expected portable StableHLO that jax {jax.__version__} compiles, "
            f"found {type(error).__name__}: {error}",
            "build the artifact again with this version of jax, or install the one it was built with",
        ) from error
    return executable_bytes(compiled), call_record(compiled)


def cache_key(stablehlo: str, mesh: "Mesh") -> str:
    """Digest of what an executable depends on: the program, the toolchain, the processor, flags and devices."""
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
    if not path.exists():
        return None
    try:
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


def _store(folder: Path, key: str, result: Compiled, say: Callable[[str], None]) -> None:
    raw, executable = result
    try:
        with writing(folder):
            folder.mkdir(exist_ok=True)
        replace_file(folder / f"{key}.exec", raw)
        entry = {"exec": to_json(file_record(folder, f"{key}.exec")), "executable": to_json(executable)}
        replace_file(folder / f"{key}.json", canonical({**entry, "sha256": sha256_of(entry)}))
    except ArtifactError as error:
        say(f"not cached: {error.message}")

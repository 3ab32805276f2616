"""The manifest's record of one target that was built: programs, parameters, state, and the machine that it needs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from msgspec import structs
from msgspec.structs import replace

from ling3export.artifacts import schema
from ling3export.artifacts.files import remove
from ling3export.artifacts.manifest import file_record
from ling3export.artifacts.records import sha256_of
from ling3export.artifacts.schema import Cell, Manifest, Mesh, Requirements
from ling3export.cache.cells import Built
from ling3export.cache.keys import fingerprint, toolchain
from ling3export.foundation.errors import PlanError
from ling3export.model.config import Config
from ling3export.model.geometry import CHUNK
from ling3export.model.parameters import parameters
from ling3export.model.state import state_arrays
from ling3export.plan.kernels import level_of
from ling3export.plan.plan import Plan
from ling3export.plan.recorded import config_of


def target_record(
    folder: Path, manifest: Manifest, plan: Plan, built: Mapping[str, Built], programs: str
) -> schema.Target:
    """The record of one target, whose programs lie in ``programs`` of the artifact's folder."""
    geometry, target, config = plan.geometry, plan.target, config_of(manifest)
    named = {}
    for cell in sorted(plan.cells, key=lambda cell: (cell.phase, cell.padding)):
        base = f"{programs}/{cell.name}"
        tiers = {suffix: file_record(folder, f"{base}.{suffix}") for suffix in ("stablehlo", "exec")}
        text = f"{base}.{schema.GRAPH}"
        if not plan.graphs:
            remove(folder / text, folder)
        graph = file_record(folder, text) if (folder / text).exists() else None
        status = "compiled" if target.runs_here else "compiled, not executed"
        named[cell.name] = Cell(**structs.asdict(built[cell.name].program) | tiers | {"graph": graph, "status": status})
    arrays = tuple(
        schema.StateArrayRecord(row.name, row.shape, row.dtype, tuple(row.spec), row.axes)
        for row in state_arrays(config, geometry)
    )
    requires, mesh = _needs([built[name] for name in named])
    kernels = file_record(folder, f"{programs}/{schema.KERNELS}") if geometry.kernels else None
    if kernels is not None:
        features = {*(requires.cpu_features or ()), *level_of(geometry.kernels).features}
        requires = replace(requires, cpu_features=tuple(sorted(features)))
    return schema.Target(
        platform=target.platform,
        kind=target.kind,
        topology=target.topology,
        mesh=mesh,
        requires=requires,
        toolchain=toolchain(target),
        fingerprint=fingerprint(config, plan),
        state_abi=state_abi(config, geometry.dtype),
        geometry=asdict(geometry),
        parameters=tuple(parameters(config, geometry)),
        state=schema.State(
            *(geometry.placement, geometry.slots, geometry.pages, geometry.page_size, geometry.max_pages),
            *(CHUNK, arrays, geometry.snapshots or None),
        ),
        cells=named,
        kernels=kernels,
        state_program=file_record(folder, f"{programs}/{schema.STATE}") if target.platform == "cpu" else None,
        portable=stablehlo_version((folder / named[next(iter(named))].stablehlo.path).read_bytes()[:64]),
    )


def stablehlo_version(blob: bytes) -> str:
    """The version of StableHLO that a portable program is written in.

    Raises:
        ValueError: The bytes are not StableHLO's portable form.
    """
    head = re.match(rb"ML\xefR\x0dStableHLO_v(\d{1,4}\.\d{1,4}\.\d{1,4})\0", blob)
    if head is None:
        raise ValueError(f"expected StableHLO's portable form, found {blob[:24]!r}")
    return head[1].decode()


def state_abi(config: Config, dtype: str) -> str:
    """The sha256 of the form of one sequence's state, whatever the weights (`Manifest.state_of` adds them).

    The model, the dtypes and the order of the arrays count; pools, paddings, sharding and TP do not.
    """
    return sha256_of(
        {
            "format": 2,
            "config": config.semantic(),
            "mla.latent": {"dtype": dtype, "axes": ["layers", "tokens", "latent then roped key"]},
            "kda.recurrent": {"dtype": "float32", "axes": ["layers", "heads", "key", "value"]},
            "kda.conv": {"dtype": dtype, "axes": ["layers", "q k v", "heads", "channels", "taps, oldest first"]},
        }
    )


def _needs(built: Sequence[Built]) -> tuple[Requirements, Mesh]:
    """One kind of machine, the same devices, and every feature that an executable uses; refuses different machines."""
    features = {feature for cell in built for feature in cell.requires.cpu_features or ()}
    needs = {(str(replace(cell.requires, cpu_features=None)), cell.mesh): cell.requires for cell in built}
    if len(needs) != 1:
        raise PlanError(
            f"programs: expected all compiled for the same machine and devices, found {len(needs)} kinds",
            "build again without what the cache has: --cache redo",
        )
    ((_, mesh), requires), *_ = needs.items()
    return replace(requires, cpu_features=tuple(sorted(features)) or None), mesh

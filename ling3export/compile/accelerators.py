"""Compiles cells for a TPU slice or an NVIDIA card that is not here, with the compiler that would run there.

The executable comes from a lowering of its own, not from the portable program: ``jax.export`` lowers for readers of
other versions (``forward_compatible``), which makes kernels slower.
"""

import hashlib
import re
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import Mesh
from msgspec import structs

from ling3export.artifacts.program_records import Lowering
from ling3export.compile.lower import Compiled, compiled_by, mesh_of, prepared
from ling3export.cost.chips import CARDS, target_config
from ling3export.cost.estimates import collectives_of, context_of, estimate
from ling3export.cost.roofline import TOKENS, roofline_bound
from ling3export.foundation.errors import PlanError
from ling3export.foundation.tables import readable
from ling3export.graph.hlo import packed
from ling3export.graph.optimized import read
from ling3export.model.config import Config
from ling3export.model.geometry import Geometry
from ling3export.plan.targets import TargetSpec

# XLA:TPU's room for the tiles of one operation, KiB. A chip that reads all experts from HBM reads 8 bits in large tiles
# as fast as the memory gives them (docs/log/programs-tpu.md); on a slice the room is better used for weights that are
# brought ahead.
LARGE_TILES = {"xla_tpu_scoped_vmem_limit_kib": "98304"}


def compiler_options(target: TargetSpec, geometry: Geometry) -> dict[str, str]:
    """Options for the compiler: LARGE_TILES for 8-bit weights on one v6e chip, else none."""
    large = target.kind == "v6e" and target.tp == 1 and geometry.weights == "int8-channel"
    return dict(LARGE_TILES) if large else {}


def topology_mesh(target: TargetSpec) -> Mesh:
    """All devices of ``target`` on the one mesh axis, a slice's in the ring order that jax chooses for them.

    Raises:
        PlanError: The compiler does not know the topology, or jax's first card is another one than the target's.
    """
    if target.autotuned:
        card, wanted = jax.devices("cuda")[0], CARDS[target.kind or ""]
        if card.device_kind != wanted:
            raise PlanError(
                f"target `{target.text}`: expected jax's first card to be {wanted}, found {card.device_kind}",
                "CUDA_VISIBLE_DEVICES says which cards jax sees",
            )
        return mesh_of([card])
    if target.platform == "cuda":
        assert target.chip is not None
        card = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target_config(target.chip), topology="1x1x1"
        )
        return mesh_of(card.devices)
    one_chip = target.processes == 1 and set(target.topology or "") <= set("1x")
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if one_chip else {}
    try:
        topology = topologies.get_topology_desc(f"{target.kind}:{target.topology}", platform="tpu", **bounds)
    except (RuntimeError, ValueError) as error:
        raise PlanError(f"target `{target.text}`: expected a topology that libtpu knows, found: {error}") from error
    return mesh_of(mesh_utils.create_device_mesh((target.tp,), devices=topology.devices))


@dataclass(frozen=True)
class Direct:
    """A cell that is lowered for the devices of one target, not yet compiled."""

    lowered: Any  # jax's
    mesh: Mesh  # the target's devices
    seconds: float  # how long lowering took
    options: dict[str, str]  # :func:`compiler_options`

    @property
    def digest(self) -> str:
        """sha256 of the module's text, which has no source locations."""
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()


def lower_for(config: Config, geometry: Geometry, phase: str, padding: int, target: TargetSpec) -> Direct:
    started = time.perf_counter()
    mesh = topology_mesh(target)
    _, function, arguments = prepared(config, geometry, phase, padding, mesh)
    options = compiler_options(target, geometry)
    return Direct(function.lower(*arguments), mesh, time.perf_counter() - started, options)


def compile_for(
    direct: Direct, config: Config, geometry: Geometry, phase: str, padding: int, target: TargetSpec
) -> tuple[bytes, Compiled, bytes]:
    """Compiles a lowered cell: the serialized executable, its record, and its packed text.

    Raises:
        PlanError: It needs more memory than a device has; the message has the compiler's sum.
    """
    raw, record, text = compiled_for(direct, f"{phase}@{padding}", target)
    return raw, priced(record, text, config, geometry, phase, padding, target), packed(text)


def compiled_for(direct: Direct, cell: str, target: TargetSpec) -> tuple[bytes, Compiled, str]:
    """The serialized executable, the compiler's record of it, and its text. Raises as :func:`compile_for`."""
    try:
        make = partial(direct.lowered.compile, compiler_options=direct.options)
        raw, record, compiled = compiled_by(make, direct.seconds)
    except jax.errors.JaxRuntimeError as error:
        raise _too_large(error, target, cell) from error
    return raw, record, compiled.as_text() or ""


def priced(
    record: Compiled, text: str, config: Config, geometry: Geometry, phase: str, padding: int, target: TargetSpec
) -> Compiled:
    """``record`` with estimates, which follow from the compiler's ``text``, and bounds."""
    assert target.chip is not None
    tokens = min(TOKENS, geometry.max_pages * geometry.page_size)
    graph = read(text, f"{phase}@{padding}", "", context_of(config, geometry, phase, padding, (), target.chip))
    total = graph.totals()
    record = structs.replace(
        record,
        flops=total.flops,
        bytes_accessed=total.bytes,
        collectives={},
        lowering=Lowering(direct=True, forward_compatible=False),
        floor=roofline_bound(config, geometry, phase, padding, target.chip, tokens),
    )
    if target.platform == "cuda":  # whose compiler estimates no cycles; with one card there are no collectives
        return record
    return structs.replace(record, collectives=collectives_of(graph), estimate=estimate(graph, target.chip, tokens))


def _too_large(error: Exception, target: TargetSpec, cell: str) -> Exception:
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return error
    assert target.chip is not None
    reason = re.sub(r"^.*?RESOURCE_EXHAUSTED:\s*", "", text, flags=re.S).split("\n")[0]
    return PlanError(
        f"memory of `{target.text}`: expected {cell} to fit {readable(target.chip.memory)} a device, found: {reason}",
        "lower --memory-fraction, --pages, --max-running or the padding, or take a larger topology",
    )

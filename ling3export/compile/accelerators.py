"""Compiles cells for a TPU slice or an NVIDIA card that is not here, with the compiler that would run there.

The executable comes from the direct lowering, not from the portable file: ``jax.export`` lowers for readers of other
versions (``forward_compatible``), which makes kernels slower.
"""

import hashlib
import re
import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from ling3export.artifacts.schema import Lowering
from ling3export.compile.lower import LOCATION_OPTIONS, Compiled, described, with_shardings
from ling3export.cost.estimates import estimate
from ling3export.cost.roofline import TOKENS, expert_times, loop_trips, roofline_bound
from ling3export.errors import PlanError
from ling3export.model.config import Config
from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.program import build_step
from ling3export.plan.chips import CARDS, target_config
from ling3export.plan.targets import Target
from ling3export.runners.load import pjrt
from ling3export.tables import readable


def topology_mesh(target: Target) -> Mesh:
    """All devices of a slice on the one axis, in the ring order that jax chooses for them; none of them is here.

    But for an autotuned target, whose one device is.

    Raises:
        PlanError: The compiler does not know the topology; jax's first card is another one than the target's.
    """
    if target.autotuned:
        card, wanted = jax.devices("cuda")[0], CARDS[target.kind or ""]
        if card.device_kind != wanted:
            raise PlanError(
                f"target `{target.text}`: expected jax's first card to be {wanted}, found {card.device_kind}",
                "CUDA_VISIBLE_DEVICES says which cards jax sees",
            )
        return Mesh(np.array([card]), (AXIS,), axis_types=(AxisType.Auto,))
    if target.platform == "cuda":
        assert target.chip is not None
        card = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=target_config(target.chip), topology="1x1x1"
        )
        return Mesh(np.array(card.devices), (AXIS,), axis_types=(AxisType.Auto,))
    single = (
        {"chips_per_host_bounds": [1, 1, 1]}
        if target.processes == 1 and set(target.topology or "") <= set("1x")
        else {}
    )
    try:
        described = topologies.get_topology_desc(f"{target.kind}:{target.topology}", platform="tpu", **single)
    except (RuntimeError, ValueError) as error:
        raise PlanError(f"target `{target.text}`: expected a topology that libtpu knows, found: {error}") from error
    devices = mesh_utils.create_device_mesh((target.tp,), devices=described.devices)
    return Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))


@dataclass(frozen=True)
class Direct:
    """A cell that is lowered for one slice, not yet compiled.

    Attributes:
        lowered: jax's.
        mesh: The slice's devices.
        seconds: That lowering took.
    """

    lowered: Any
    mesh: Mesh
    seconds: float

    @property
    def digest(self) -> str:
        """sha256 of the module's text, which has no source locations."""
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()


def lower_for(config: Config, geometry: Geometry, phase: str, padding: int, target: Target) -> Direct:
    """Lowers one cell for ``target``."""
    for name, value in LOCATION_OPTIONS.items():
        jax.config.update(name, value)
    started = time.perf_counter()
    mesh = topology_mesh(target)
    step = build_step(config, geometry, phase, padding, mesh)
    arguments = with_shardings(step.arguments, step.specs, mesh)
    lowered = jax.jit(step.call, donate_argnums=(1,)).lower(*arguments)
    return Direct(lowered, mesh, time.perf_counter() - started)


def compile_for(
    direct: Direct, config: Config, geometry: Geometry, phase: str, padding: int, target: Target
) -> tuple[bytes, Compiled]:
    """Compiles one cell for ``target``: the serialized executable, and what describes it.

    Raises:
        PlanError: It needs more memory than a device has; with the compiler's sum.
    """
    assert target.chip is not None
    started = time.perf_counter()
    with pjrt.no_compilation_cache():
        try:
            compiled = direct.lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise _too_large(error, target, f"{phase}@{padding}") from error
        raw = pjrt.executable_bytes(compiled)
    seconds = round(direct.seconds + time.perf_counter() - started, 3)
    tokens = min(TOKENS, geometry.max_pages * geometry.page_size)
    record = replace(
        described(compiled, seconds), lowering=Lowering(direct=True, forward_compatible=False), collectives={},
        floor=roofline_bound(config, geometry, phase, padding, target.chip, tokens),
    )  # fmt: skip
    if target.platform == "cuda":  # whose compiler estimates no cycles; with one card there are no collectives
        return raw, record
    trips = loop_trips(config, geometry, phase, padding, tokens)
    estimated, collectives = estimate(compiled.as_text() or "", target.chip, trips, tokens)
    experts = None
    if phase != "sample" and config.moe_layers:
        experts = expert_times(config, geometry, padding, target.chip)
    return raw, replace(record, collectives=collectives, estimate=estimated, experts=experts)


def _too_large(error: Exception, target: Target, cell: str) -> Exception:
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        return error
    assert target.chip is not None
    said = re.sub(r"^.*?RESOURCE_EXHAUSTED:\s*", "", text, flags=re.S).split("\n")[0]
    return PlanError(
        f"memory of `{target.text}`: expected {cell} to fit {readable(target.chip.memory)} a device, found: {said}",
        "lower --memory-fraction, --pages, --max-running or the padding, or take a larger topology",
    )

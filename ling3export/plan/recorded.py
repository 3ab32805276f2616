"""The configuration, options and plans of an artifact, read back from its manifest."""

from dataclasses import replace
from typing import Any

from ling3export.artifacts.records import to_json
from ling3export.artifacts.schema import Manifest
from ling3export.foundation.errors import ArtifactError
from ling3export.model.config import FIXED, Config
from ling3export.model.geometry import Geometry
from ling3export.plan.options import SHARED, Options
from ling3export.plan.plan import Plan
from ling3export.plan.targets import TargetSpec


def config_fields(manifest: Manifest) -> dict[str, Any]:
    """A config.json with the same meaning as the one that an artifact was built from."""
    return {"model_type": "bailing_hybrid", **FIXED, **to_json(manifest.config)}


def config_of(manifest: Manifest) -> Config:
    """The configuration of an artifact.

    Raises:
        ConfigError: This version models another one.
    """
    return Config.from_dict(config_fields(manifest), where="the manifest")


def options_of(manifest: Manifest, options: Options) -> Options:
    """``options`` with the values that all targets of an artifact share."""
    return replace(options, **shared(manifest))


def shared(manifest: Manifest) -> dict[str, Any]:
    """The values that all targets of an artifact share, by the options' names."""
    plan = manifest.plan
    return {name: plan.forms if name == "weights" else getattr(plan, name) for name in SHARED}


def plan_of(manifest: Manifest, name: str) -> Plan:
    """The plan of a target as it was built.

    Raises:
        ArtifactError: Another version of ling3export built it, whose geometry is not this one's.
    """
    record, plan = manifest.targets[name], manifest.plan
    try:
        forms: dict[str, Any] = dict(record.geometry)
        geometry = Geometry(**forms)
    except TypeError as error:
        raise ArtifactError(
            f"target `{name}`: its geometry in the manifest is not one of this version of ling3export ({error})",
            "build the artifact again",
        ) from error
    target = TargetSpec(record.platform, record.kind, record.topology, record.tp, record.processes)
    return Plan(
        target,
        geometry,
        plan.paddings,
        plan.decode_paddings,
        plan.context,
        score_paddings=record.paddings("score"),
        ffn_paddings=record.paddings("experts"),
    )

"""The compiler that belongs to a target: whether it is installed, and the environment that it needs."""

import re
from importlib import metadata

from ling3export.foundation.errors import PlanError
from ling3export.plan.targets import Target

CUDA_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


def wanted_libtpu() -> str:
    """The libtpu that belongs to the jax that is installed, as jax's own metadata pins it: ``0.0.48``."""
    for line in metadata.requires("jax") or ():
        if match := re.match(r"libtpu\s*\(?==\s*([\d.]+?)(?:\.\*)?\)?\s*;", line):
            return match[1]
    raise PlanError(f"jax {metadata.version('jax')}: expected its metadata to name a libtpu, found none")


def check_toolchain(target: Target) -> None:
    """Refuses a target whose compiler is not installed, before any work is done.

    Another libtpu than jax's own may compile, and then end the process when the program is inspected.

    Raises:
        PlanError: libtpu, or jax's plugin for cuda, is missing or does not belong to the jax that is installed; names
            both versions.
    """
    jax = metadata.version("jax")
    if target.platform == "cuda":
        for name in CUDA_PACKAGES:
            if (found := _installed(name)) != jax:
                raise _refused(target, f"{name} {jax} (of the version of jax)", name, found)
    if target.platform == "tpu":
        wanted, found = wanted_libtpu(), _installed("libtpu")
        if not f"{found}.".startswith(f"{wanted}."):
            expected = f"libtpu {wanted} (the compiler that belongs to jax {jax})"
            raise _refused(target, expected, "libtpu", found)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _refused(target: Target, expected: str, package: str, version: str | None) -> PlanError:
    found = "none" if version is None else f"{package} {version}"
    hint = f'pip install "ling3export[{target.platform}]"'
    return PlanError(f"target `{target.text}`: expected {expected}, found {found}", hint)


def compiler_environment(target: Target) -> dict[str, str]:
    """What must stand in the environment before jax is imported to compile for an accelerator that is not here."""
    if target.autotuned:  # weights are no part of compiling: leave the card's memory to whoever runs there
        return {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if target.platform == "cuda":
        return {"JAX_PLATFORMS": "cpu"}
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server: this is no TPU machine
        "TPU_ACCELERATOR_TYPE": f"{target.kind}-{target.tp}",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_LOG_DIR": "disabled",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a second compiler on this machine ends at a lock file
    }

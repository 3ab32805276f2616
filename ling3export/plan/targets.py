"""The machines that programs are built for, how a user writes them, and the compiler of each. Imports no jax."""

import re
from dataclasses import dataclass
from importlib import metadata

from ling3export.cost.chips import CHIPS, HERE, Chip, kind_here
from ling3export.foundation.errors import PlanError, listed
from ling3export.foundation.extras import install, installed
from ling3export.model.config import Config

DEFAULT_CPU_TP = 16
CUDA_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")


@dataclass(frozen=True)
class TargetSpec:
    """A machine to build for, at a tensor parallelism."""

    platform: str  # ``cpu``, ``tpu`` or ``cuda``
    kind: str | None  # the kind of accelerator; None for cpu
    # The slice, ``4x4``; on cpu the hosts and the devices of each; on cuda ``here``, if the card of this machine
    # compiles; else None.
    topology: str | None
    tp: int  # devices that share the model
    processes: int = 1  # how many a running model has: one a host

    @property
    def text(self) -> str:
        """The target the way a user writes it, without TP."""
        return ":".join(part for part in (self.platform, self.kind, self.topology) if part)

    @property
    def name(self) -> str:
        """The folder name: ``:`` and ``@`` written as ``-``."""
        return f"{self.text}-tp{self.tp}".replace(":", "-")

    @property
    def autotuned(self) -> bool:
        """Whether the card itself compiles the programs, and so tries kernels."""
        return self.platform == "cuda" and self.topology == HERE

    @property
    def chip(self) -> Chip | None:
        """Facts about the accelerator; None for cpu."""
        return CHIPS.get((self.platform, self.kind or ""))

    @property
    def runs_here(self) -> bool:
        """Whether the machine that builds it also runs it: cpu, or the card that compiles. Others are not executed."""
        return self.platform == "cpu" or self.autotuned


def known_targets() -> list[str]:
    """Every target that can be written, without TP."""
    slices = [f"tpu:{chip.kind}:{name}" for chip in CHIPS.values() for name in chip.topologies]
    return ["cpu", "cpu:4x4", *slices, *(f"cuda:{kind}" for kind in _kinds("cuda")), "cuda"]


def _kinds(platform: str) -> list[str]:
    return [chip.kind for chip in CHIPS.values() if chip.platform == platform]


def parse_target(text: str, tp: int | None, config: Config) -> TargetSpec:
    """Parses ``PLATFORM[:KIND][:TOPOLOGY][@TP]``.

    Args:
        tp: ``--tp``, which speaks of cpu; elsewhere only ``@TP`` counts, and all devices of a topology are taken.
        config: The model; TP must divide its TP shards.

    Raises:
        PlanError: A platform, kind or topology that is not known, with those that are; a TP that does not fit.
    """
    match = re.fullmatch(r"([^:@]+)(?::([^:@]+))?(?::([^:@]+))?(?:@(?:tp)?(\d+))?", text)
    if match is None:
        hint = "e.g. tpu:v6e:4x4 or cpu@4"
        raise _refused(text, "PLATFORM[:KIND][:TOPOLOGY][@TP]", "another form", hint)
    platform, kind, topology, digits = match.groups()
    wanted = int(digits) if digits else None
    if platform == "cpu":
        return _cpu(text, kind, topology, wanted, tp, config)
    if platform == "cuda":
        return _cuda(text, kind, topology, wanted)
    if platform == "tpu":
        return _tpu(text, kind, topology, wanted, config)
    raise _refused(text, "a platform of cpu, tpu, cuda", f"`{platform}`")


def _refused(text: str, expected: str, actual: str, hint: str | None = None) -> PlanError:
    if hint is None:
        platform = text.partition(":")[0]
        known = [name for name in known_targets() if name.partition(":")[0] == platform] or known_targets()
        hint = f"known targets: {listed(known, 40)}"
    return PlanError(f"target `{text}`: expected {expected}, found {actual}", hint)


def _cpu(
    text: str, sides: str | None, more: str | None, wanted: int | None, tp: int | None, config: Config
) -> TargetSpec:
    """``cpu``, or ``cpu:4x4``: 4 processes of 4 devices each."""
    if sides is not None:
        return _cpu_hosts(text, sides, more, tp if wanted is None else wanted, config)
    chosen = tp if wanted is None else wanted
    if chosen is None:
        chosen = max(d for d in _divisors(config) if d <= DEFAULT_CPU_TP)
    _check_tp("--tp" if wanted is None else f"TP of target `{text}`", chosen, config)
    return TargetSpec("cpu", None, None, chosen)


def _cpu_hosts(text: str, sides: str, more: str | None, wanted: int | None, config: Config) -> TargetSpec:
    match = re.fullmatch(r"([1-9]\d?)x([1-9]\d?)", sides)
    if match is None or more is not None or int(match[1]) < 2:
        actual = f"`{sides}`" if more is None else f"`{sides}:{more}`"
        raise _refused(text, "HOSTSxDEVICES behind cpu, from two hosts on", actual, "e.g. cpu:4x4")
    hosts, devices = int(match[1]), int(match[1]) * int(match[2])
    if wanted not in (None, devices):
        raise _refused(text, f"TP to be its {devices} devices", str(wanted), "leave out --tp")
    _check_tp(f"devices of `{text}`", devices, config)
    return TargetSpec("cpu", None, sides, devices, hosts)


def _divisors(config: Config) -> list[int]:
    return [d for d in range(1, config.tp_shards + 1) if config.tp_shards % d == 0]


def _check_tp(what: str, tp: int, config: Config) -> None:
    if tp not in _divisors(config):
        raise PlanError(
            f"{what}: expected a divisor of {config.tp_shards} (the common divisor of heads "
            f"{config.num_attention_heads}, experts {config.num_experts}, vocabulary {config.vocab_size} and widths), "
            f"found {tp}",
            f"this model splits over {listed([str(d) for d in _divisors(config)], 12)}",
        )


def _tpu(text: str, kind: str | None, topology: str | None, wanted: int | None, config: Config) -> TargetSpec:
    kinds = _kinds("tpu")
    if kind not in kinds:
        raise _refused(text, f"a kind of {', '.join(kinds)}", _shown(kind))
    chip = CHIPS["tpu", kind]
    if topology not in chip.topologies:
        raise _refused(text, f"a topology of {', '.join(chip.topologies)} for {kind}", _shown(topology))
    devices = chip.count(topology)
    if wanted not in (None, devices):
        fits = [name for name in chip.topologies if chip.count(name) == wanted]
        hint = f"tpu:{kind}:{fits[0]} has {wanted}" if fits else "leave out --tp: a TPU target takes all devices"
        raise _refused(text, f"TP to be its {devices} devices", str(wanted), hint)
    _check_tp(f"devices of `{text}`", devices, config)
    chips = devices // chip.devices
    return TargetSpec("tpu", kind, topology, devices, -(-chips // chip.chips_per_host))


def _cuda(text: str, kind: str | None, topology: str | None, wanted: int | None) -> TargetSpec:
    kinds = _kinds("cuda")
    if kind is None:
        kind, topology = kind_here(text), HERE
    if kind not in kinds:
        raise _refused(text, f"a kind of {', '.join(kinds)}", _shown(kind))
    if topology == HERE:
        kind_here(text, kind)
    elif topology is not None:
        raise _refused(text, "no topology for cuda", f"`{topology}`", f"write cuda:{kind}")
    if wanted not in (None, 1):
        raise _refused(text, "TP to be 1 (one card)", str(wanted), f"write cuda:{kind}")
    return TargetSpec("cuda", kind, topology, 1)


def _shown(value: str | None) -> str:
    return "none" if value is None else f"`{value}`"


def wanted_libtpu() -> str:
    """The libtpu that belongs to the jax that is installed, as jax's own metadata pins it: ``0.0.48``."""
    for line in metadata.requires("jax") or ():
        if match := re.match(r"libtpu\s*\(?==\s*([\d.]+?)(?:\.\*)?\)?\s*;", line):
            return match[1]
    raise PlanError(f"jax {metadata.version('jax')}: its metadata names no libtpu")


def check_toolchain(target: TargetSpec) -> None:
    """Refuses a target whose compiler is not installed, before any work is done.

    Another libtpu than jax's own may compile, and then end the process when the program is inspected.

    Raises:
        PlanError: libtpu, or jax's plugin for cuda, is missing or does not belong to the jax that is installed; names
            both versions.
    """
    jax = metadata.version("jax")
    if target.platform == "cuda":
        for name in CUDA_PACKAGES:
            if (version := installed(name)) != jax:
                raise _lacking(target, f"{name} {jax} (of the version of jax)", name, version)
    if target.platform == "tpu":
        wanted, version = wanted_libtpu(), installed("libtpu")
        if not f"{version}.".startswith(f"{wanted}."):
            expected = f"libtpu {wanted} (the compiler that belongs to jax {jax})"
            raise _lacking(target, expected, "libtpu", version)


def _lacking(target: TargetSpec, expected: str, package: str, version: str | None) -> PlanError:
    actual = "none" if version is None else f"{package} {version}"
    return PlanError(f"target `{target.text}`: expected {expected}, found {actual}", install(target.platform))


def compiler_environment(target: TargetSpec) -> dict[str, str]:
    """Environment variables for a process that compiles for an accelerator, to be set before it imports jax."""
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

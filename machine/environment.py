"""Settings before jax starts, and the needs of a compiled program: toolchain, processor, devices.

Imports no jax: it is imported once the environment is set.
"""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling3export.artifacts.schema import Requirements
from ling3export.foundation.errors import Ling3Error
from ling3export.foundation.extras import installed
from ling3export.foundation.reading import read_bytes

if TYPE_CHECKING:
    import jax

LARGEST_FLAG_FILE = 64 << 20  # bytes
# The packages that hold a platform's compiler, where that is not jaxlib itself.
PLUGINS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}
FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")  # what compilers and runtimes read
# When a virtual device is late for a collective, XLA warns after 20 s and ends the process (SIGABRT) 40 s later. On a
# loaded machine a device may be later than that and come all the same: docs/log/hosts.md, 2026-11-22.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
# XLA:CPU writes the features that it was allowed to use next to the code, as LLVM spells them: "+avx,+avx2,-amx-tile".
TARGET_FEATURES = re.compile(rb"\+[a-z0-9.-]+(?:,[+-][a-z0-9.-]+){8,}")


def _table(words: str) -> dict[str, str]:
    """``"avx pni=sse3"`` → ``{"avx": "avx", "pni": "sse3"}``."""
    return {word.partition("=")[0]: word.rpartition("=")[2] for word in words.split()}


# The features that a compiler may turn into instructions, in the spelling of /proc/cpuinfo, and in LLVM's where that
# differs. Flags of the kernel, of virtual machines and of tuning (erms, constant_tsc, hypervisor, …) never decide
# whether compiled code runs.
X86_FEATURES = _table(
    "cmov cx16 mmx sse sse2 pni=sse3 ssse3 sse4_1=sse4.1 sse4_2=sse4.2 sse4a popcnt abm=lzcnt bmi1=bmi bmi2 tbm movbe "
    "adx aes vaes pclmulqdq=pclmul vpclmulqdq sha_ni=sha sha512 sm3 sm4 gfni avx avx2 f16c fma fma4 xop "
    "avx512f avx512bw avx512cd avx512dq avx512vl avx512ifma avx512vbmi avx512_vbmi2=avx512vbmi2 "
    "avx512_vnni=avx512vnni avx512_bitalg=avx512bitalg avx512_vpopcntdq=avx512vpopcntdq "
    "avx512_vp2intersect=avx512vp2intersect avx512_bf16=avx512bf16 avx512_fp16=avx512fp16 "
    "avx_vnni=avxvnni avx_vnni_int8=avxvnniint8 avx_vnni_int16=avxvnniint16 avx_ifma=avxifma "
    "avx_ne_convert=avxneconvert amx_tile=amx-tile amx_int8=amx-int8 amx_bf16=amx-bf16 amx_fp16=amx-fp16 "
    "amx_complex=amx-complex"
)
ARM_FEATURES = _table(
    "asimd=neon asimdhp=fullfp16 asimddp=dotprod asimdrdm=rdm asimdfhm=fp16fml atomics=lse crc32=crc aes sha2 sha3 "
    "bf16 i8mm sve sve2 svebf16=bf16 svei8mm=i8mm sme"
)


def prepare_cpu(devices: int) -> None:
    """Makes jax start with ``devices`` virtual CPU devices; call it before jax starts, best before its import.

    Sets JAX_NUM_CPU_DEVICES; NPROC to at least ``devices`` + 2 (jax 0.10.2 waits forever in a collective when its
    thread pool has fewer threads than devices; measured: no cost in any version); OPENBLAS_NUM_THREADS=1 (one pool per
    virtual device makes a LAPACK call ten times slower), JAX_PLATFORMS=cpu, and PATIENCE in XLA_FLAGS. The last three
    only where unset.

    Raises:
        Ling3Error: jax runs already, with fewer devices.
    """
    if devices < 1:
        raise Ling3Error(f"CPU devices: expected 1 or more, found {devices}")
    os.environ["JAX_NUM_CPU_DEVICES"] = str(devices)
    threads = os.environ.get("NPROC", "")
    os.environ["NPROC"] = str(max(devices + 2, os.cpu_count() or 1, int(threads) if threads.isdigit() else 0))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    platforms = os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if PATIENCE.partition("=")[0] not in flags and flags[:1] in ("", "-"):  # anything else is the name of a file
        os.environ["XLA_FLAGS"] = f"{flags} {PATIENCE}".strip()
    jax = sys.modules.get("jax")
    if jax is None:
        return
    try:  # jax read the environment when it was imported; its configuration still counts until its first operation
        jax.config.update("jax_num_cpu_devices", devices)
        if jax.config.jax_platforms is None:
            jax.config.update("jax_platforms", platforms)
    except RuntimeError:
        count = jax.local_device_count("cpu")
        if count < devices:
            raise Ling3Error(
                f"CPU devices: expected {devices}, found {count} in this process, where jax runs already",
                hint=f"set JAX_NUM_CPU_DEVICES={devices} and NPROC={devices + 2} before jax's first operation, "
                "or start a new process",
            ) from None


def memory() -> tuple[int, int, int]:
    """Bytes of all memory, of available memory, and of free swap; zeros if the kernel does not report them."""
    try:
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, available, swap = (int(rows[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return 0, 0, 0
    return total, available, swap


def memory_limit(path: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    """Number of bytes that the control group may use; None if there is no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def usable_memory() -> tuple[int, int]:
    """Bytes of all and of free memory of this machine or its control group; zeros if unknown."""
    total, available, _ = memory()
    bound = memory_limit() or total
    return min(total, bound), min(available, bound)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """Operating system and instruction set, such as ``linux-x86_64``."""
    return f"{sys.platform}-{platform.machine()}"


def feature_names() -> dict[str, str]:
    """The features that compiled code may depend on here: this machine's spelling → LLVM's."""
    return ARM_FEATURES if platform.machine() in ("aarch64", "arm64") else X86_FEATURES


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The features of this processor among ``feature_names()``, in the kernel's spelling, sorted.

    Empty where ``cpuinfo`` does not exist (no Linux): then no recorded requirement is met, and none is recorded.
    """
    names = feature_names()
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return sorted(set(value.split()) & names.keys())
    return []


def toolchain() -> dict[str, Any]:
    """Versions and flags that decide the compiler's output for a program and a target. Starts no backend."""
    import jax
    import jaxlib

    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "plugins": plugins(*PLUGINS),
        "machine": machine(),
        "cpu_features": cpu_features(),
        "flags": compiler_flags(),
    }


def compiler_flags() -> dict[str, Any]:
    """The environment variables that tell the compilers something, and the sha256 of the files that they name.

    A value without a leading dash is a file of flags, as XLA reads it; a flag's value may be a file, too. PATIENCE does
    not count: it decides no program.

    Raises:
        Ling3Error: A file cannot be read, or is very long.
    """
    values = {name: os.environ.get(name, "").replace(PATIENCE, "").strip() for name in FLAGS}
    flags: dict[str, Any] = {name: value for name, value in values.items() if value}
    files, texts = dict[str, str](), list(flags.values())
    for text in texts:
        for word in text.split():
            path = word.partition("=")[2] if word.startswith("-") else word
            if path and path not in files and os.path.isfile(path):
                try:
                    where, name = os.path.split(os.path.realpath(path))
                    data = read_bytes(Path(where), name, LARGEST_FLAG_FILE)
                except OSError as error:
                    raise Ling3Error(f"flags: expected a readable file, found {error.strerror}, at {path}") from error
                files[path] = hashlib.sha256(data).hexdigest()
                if not word.startswith("-") or word.startswith("--flagfile="):
                    texts.append(data.decode(errors="replace"))
    return flags | {"files": files} if files else flags


def plugins(*platforms: str) -> dict[str, str]:
    """Installed compiler packages of ``platforms``, with their versions."""
    versions = {name: installed(name) for platform in platforms for name in PLUGINS.get(platform, ())}
    return {name: version for name, version in versions.items() if version is not None}


def requirements(devices: "Sequence[jax.Device]", raw: bytes) -> Requirements:
    """The requirements of an executable for ``devices``, whose bytes are ``raw``."""
    import jaxlib

    kind = platform_of(devices[0])
    common = (jaxlib.__version__, kind, devices[0].device_kind)
    if kind == "cpu":
        return Requirements(*common, machine=machine(), cpu_features=tuple(_features_in(raw)))
    return Requirements(*common, plugins=plugins(kind))


def platform_of(device: "jax.Device") -> str:
    """``cpu``, ``gpu`` or ``tpu``: a device that is only described calls itself ``cuda``."""
    return "gpu" if device.platform == "cuda" else device.platform


def _features_in(raw: bytes) -> list[str]:
    """This processor's features that the compiler was allowed to use, which --xla_cpu_max_isa in XLA_FLAGS limits.

    They are read from the executable's own list; without one, all features of this processor.
    """
    names = feature_names()
    lists = TARGET_FEATURES.findall(raw)
    used = {word[1:].decode() for words in lists for word in words.split(b",") if word.startswith(b"+")}
    return [name for name in cpu_features() if not lists or names[name] in used]

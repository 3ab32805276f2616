"""Which form of the native kernels executables for cpu call, and the compiler that makes it. Imports no jax."""

import hashlib
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import ling3export
from ling3export.foundation.errors import PlanError
from ling3export.foundation.extras import install
from ling3export.machine.environment import compiler_flags, cpu_features
from ling3export.model.config import Config
from ling3export.plan.options import Options
from ling3export.plan.targets import TargetSpec

FOLDER = Path(ling3export.__file__).parent / "model" / "native"
SOURCES = tuple(FOLDER / f"{name}.cc" for name in ("products", "quantized", "decode", "parallel"))
HEADERS = tuple(FOLDER / f"{name}.h" for name in ("shared", "products", "tiles", "integers", "panels", "vectors"))
COMPILERS = ("c++", "g++", "clang++")
NO_COMPILER = f"no C++ compiler ({', '.join(COMPILERS)} or the package ziglang) is installed"
HINT = f"install g++, or {install('zig')}"
CHOICES = ("auto", "on", "off")
NARROW = 256  # hidden sizes below leave so little to read that what XLA makes itself is as fast


@dataclass(frozen=True)
class Level:
    """A form of the kernels: the features that a processor must have for it, and the compiler's flags."""

    name: str
    machines: tuple[str, ...]
    features: tuple[str, ...]
    flags: tuple[str, ...]


X86, ARM = ("x86_64", "AMD64"), ("aarch64", "arm64")
_AVX2 = ("avx2", "fma")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_VNNI = (*_AVX2, *_AVX512, "avx512_vnni")
_DOTS = (*_VNNI, "avx512_bf16")
_WIDE = ("-mavx2", "-mfma", *(f"-m{name}" for name in _AVX512), "-mavx512vnni")
_BF16 = (*_WIDE, "-mavx512bf16", "-DLING3_BYTES=64")
_DOTPROD = "-march=armv8.2-a+dotprod"
ZIG = {_DOTPROD: "-mcpu=generic+v8_2a+dotprod"}  # the package's compiler takes no architecture for a processor
LEVELS = (  # the best first
    Level("amx_bf16", X86, (*_DOTS, "amx_tile", "amx_bf16"), (*_BF16, "-mamx-tile", "-mamx-bf16")),
    Level("avx512_bf16", X86, _DOTS, _BF16),
    Level("avx512_vnni", X86, _VNNI, (*_WIDE, "-DLING3_BYTES=32")),  # products of bf16 as avx2 has them
    Level("avx_vnni", X86, (*_AVX2, "avx_vnni"), ("-mavx2", "-mfma", "-mavxvnni", "-DLING3_BYTES=32")),
    Level("avx2", X86, _AVX2, ("-mavx2", "-mfma", "-DLING3_BYTES=32")),
    Level("neon_dotprod", ARM, ("asimd", "asimddp"), (_DOTPROD, "-DLING3_BYTES=16")),
    Level("neon", ARM, ("asimd",), ("-DLING3_BYTES=16",)),
    Level("plain", (*X86, *ARM), (), ()),
)
# Nobody looks at the processor's flags of exceptions; without the promise gcc makes no vectors of a choice.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=fast", "-fno-trapping-math", "-s")


def ending(level: Level) -> str:
    """The end of the names of a level's kernels: the level, and a digest of sources and flags."""
    text = b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS)) + " ".join((*FLAGS, *level.flags)).encode()
    return f"{level.name}-{hashlib.sha256(text).hexdigest()[:12]}"


def level_of(kernels: str) -> Level:
    """The level of a geometry's kernels, which must be those of this version.

    Raises:
        PlanError: They are of another version.
    """
    levels = [level for level in LEVELS if ending(level) == kernels]
    if not levels:
        raise PlanError(f"kernels: expected those of this version of ling3export, found {kernels}", "build again")
    return levels[0]


def best_level() -> Level:
    """The best form that runs on this machine."""
    features = set(cpu_features())
    return next(
        level for level in LEVELS if platform.machine() in level.machines and features.issuperset(level.features)
    )


def compiler() -> list[str] | None:
    """The command of the system's C++ compiler, or else of the one in the package ``ziglang``; None without."""
    for name in COMPILERS:
        if path := shutil.which(name):
            return [path]
    return [sys.executable, "-m", "ziglang", "c++"] if find_spec("ziglang") else None


def choose(config: Config, options: Options, target: TargetSpec) -> tuple[str, str | None]:
    """The end of the kernels' names for a geometry, empty for none, and a line that says why, if there is a choice.

    Raises:
        PlanError: Kernels are required and cannot be built.
    """
    if options.kernels not in CHOICES:
        raise PlanError(f"--kernels: expected {' or '.join(CHOICES)}, found {options.kernels}")
    if target.platform != "cpu" or options.kernels == "off":
        return "", None
    wanted = options.kernels == "on"
    if options.dtype != "bfloat16":
        if wanted:
            raise PlanError(f"--kernels on: expected bfloat16, found {options.dtype}", "leave --kernels out")
        return "", None
    if config.hidden_size < NARROW and not wanted:
        return "", None
    if compiler() is None:
        if wanted:
            raise PlanError(f"--kernels on: {NO_COMPILER}", HINT)
        return "", f"no native kernels, programs are slower: {NO_COMPILER}; {HINT}"
    limited = "xla_cpu_max_isa" in str(compiler_flags())  # for older processors than this one
    level = LEVELS[-1] if limited else best_level()
    return ending(level), f"native kernels {level.name}"

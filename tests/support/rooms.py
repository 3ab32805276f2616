"""The rooms of the package, and which of them stand below a room."""

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ling3export"

# From the top down. A room may import what stands in a later line of its tower, nothing beside it in its own line, and
# the rooms below both towers.
RUNNERS = (
    ("runners.cli",),
    ("runners.batch", "runners.route"),
    ("runners.serve", "runners.evals", "runners.bench_serving", "runners.adapters"),
    ("runners.calibrate", "runners.fleet"),
    ("runners.engine",),
    ("runners.ffn", "runners.transfer"),
    ("runners.state",),
    ("runners.load",),
    ("runners.hosts", "runners.text"),
    ("runners.endpoint", "runners.stacks"),
)
BUILD = (
    ("cli",),
    ("opened",),
    ("compile", "savedmodel", "report"),
    ("cache", "verify"),
    ("plan",),
    ("cost", "checkpoint"),
    ("graph",),
    ("model",),
)
BELOW = (("machine",), ("artifacts",), ("foundation",))
# The model knows nothing of machines, and of artifacts only the records of parameters and of their forms.
APART = {"model": {"machine", "artifacts"}}
RECORDS = {"model.parameters": {"artifacts"}, "model.quantized": {"artifacts"}}
# What a room or module of the build side may import of the runners: both command lines share their options, and
# `verify` is the one door through which a build runs what it built.
FROM_RUNNERS = {
    "cli": {"runners.cli", "runners.hosts"},
    "opened": {"runners.load"},
    "verify.engine": {"runners.calibrate", "runners.engine", "runners.transfer"},
    "verify.probe": {"runners.calibrate", "runners.load"},
    "verify.measure": {"runners.calibrate", "runners.hosts", "runners.load", "runners.text"},
    "verify.verify": {"runners.hosts"},
}


def modules() -> dict[str, Path]:
    """Dotted name of every module of the package, without ``__init__.py`` and ``__main__.py``, and its file."""
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py"), *PACKAGE.glob("*/*/*.py")]
    names = {".".join(("ling3export", *file.relative_to(PACKAGE).with_suffix("").parts)): file for file in files}
    return {name: file for name, file in sorted(names.items()) if not name.endswith(("__init__", "__main__"))}


def room(module: str) -> str:
    """``cache``, ``runners.load``, or the name of a module that stands in no room."""
    _, *parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "runners" else 1])


def below(room: str, module: str = "") -> set[str]:
    """Rooms that a room may import; with what ``module``, one of its modules, may import besides."""
    allowed = FROM_RUNNERS.get(room, set()) | FROM_RUNNERS.get(module, set())
    for tower in ((*RUNNERS, *BELOW), (*BUILD, *BELOW)):
        for line, rooms in enumerate(tower):
            if room in rooms:
                allowed |= {lower for rest in tower[line + 1 :] for lower in rest}
    return allowed - APART.get(room, set()) | RECORDS.get(module, set())

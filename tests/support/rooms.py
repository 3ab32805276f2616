"""The rooms of the package, and the table of imports that are allowed between them."""

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ling3export"

# From the top down. A room may import the rooms in later lines of its tower and the rooms below both towers, but none
# in its own line.
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
# The model may import nothing of machines, and of artifacts only the records of parameters and of their forms.
APART = {"model": {"machine", "artifacts"}}
RECORDS = {"model.parameters": {"artifacts"}, "model.quantized": {"artifacts"}}
# Modules of the runners that a room or module of the build side may import: both command lines share their options, and
# a build runs its result only through `verify`.
FROM_RUNNERS = {
    "cli": {"runners.cli", "runners.hosts"},
    "opened": {"runners.load"},
    "verify.engine": {"runners.calibrate", "runners.engine", "runners.transfer"},
    "verify.probe": {"runners.calibrate", "runners.load"},
    "verify.measure": {"runners.calibrate", "runners.hosts", "runners.load", "runners.text"},
    "verify.verify": {"runners.hosts"},
}


def modules() -> dict[str, Path]:
    """File of every module of the package by dotted name, without ``__init__.py`` and ``__main__.py``."""
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py"), *PACKAGE.glob("*/*/*.py")]
    names = {".".join(("ling3export", *file.relative_to(PACKAGE).with_suffix("").parts)): file for file in files}
    return {name: file for name, file in sorted(names.items()) if not name.endswith(("__init__", "__main__"))}


def room(module: str) -> str:
    """A module's room, such as ``cache`` or ``runners.load``, or the module's own name if it is in no room."""
    _, *parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "runners" else 1])


def below(room: str, module: str = "") -> set[str]:
    """The rooms that a room may import.

    With ``module``, one of its modules, the exceptions for that module are included.
    """
    allowed = FROM_RUNNERS.get(room, set()) | FROM_RUNNERS.get(module, set())
    for tower in ((*RUNNERS, *BELOW), (*BUILD, *BELOW)):
        for line, rooms in enumerate(tower):
            if room in rooms:
                allowed |= {lower for rest in tower[line + 1 :] for lower in rest}
    return allowed - APART.get(room, set()) | RECORDS.get(module, set())

"""The rooms of the package, and which of them stand below a room."""

from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ling3export"

# From the top down. A room may import what stands in a later line of its tower, nothing beside it in its own line.
RUNNERS = (
    ("runners.cli",),
    ("runners.batch", "runners.route"),
    ("runners.serve", "runners.evals", "runners.bench", "runners.doctor", "runners.adapters"),
    ("runners.calibrate",),
    ("runners.engine",),
    ("runners.ffn", "runners.state"),
    ("runners.load", "runners.transfer", "runners.fleet"),
    ("runners.hosts", "runners.text"),
    ("artifacts",),
    ("runners.endpoint", "runners.flight"),
    ("foundation",),
)
BUILD = (
    ("cli",),
    ("compile", "savedmodel", "report", "simulation"),
    ("cache", "verify"),
    ("pricing",),
    ("cost",),
    ("plan",),
    ("checkpoint",),
    ("model", "artifacts"),
    ("foundation",),
)
# What the build side may import of the runners.
FROM_RUNNERS = {
    "runners.calibrate",
    "runners.engine.inputs",
    "runners.ffn",
    "runners.fleet",
    "runners.hosts",
    "runners.load",
    "runners.text",
}
BESIDES = {"cli": {"runners.cli"}}


def modules() -> dict[str, Path]:
    """Dotted name of every module of the package, without ``__init__.py`` and ``__main__.py``, and its file."""
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/*.py"), *PACKAGE.glob("*/*/*.py")]
    names = {".".join(("ling3export", *file.relative_to(PACKAGE).with_suffix("").parts)): file for file in files}
    return {name: file for name, file in sorted(names.items()) if not name.endswith(("__init__", "__main__"))}


def room(module: str) -> str:
    """``cache``, ``runners.load``, or the name of a module that stands in no room."""
    _, *parts = module.split(".")
    return ".".join(parts[: 2 if parts[0] == "runners" else 1])


def below(room: str) -> set[str]:
    """Rooms and modules that a room may import."""
    allowed = set(BESIDES.get(room, ()))
    for tower, more in ((RUNNERS, set()), (BUILD, FROM_RUNNERS)):
        for line, rooms in enumerate(tower[:-1]):
            if room in rooms:
                allowed |= {lower for rest in tower[line + 1 :] for lower in rest}
                allowed |= more if room not in ("model", "artifacts") else set()
    return allowed

"""A copy of the package's sources, for tests that build or install it."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = {
    "ling3export": "ling3export",
    "artifacts": "ling3export/artifacts",
    "foundation": "ling3export/foundation",
    "machine": "ling3export/machine",
    "model": "ling3export/model",
    "runners": "ling3export/runners",
}


def copied(folder: Path) -> Path:
    """Copies what is packaged, so that a build neither leaves files in the checkout nor uses old ones there."""
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return folder

"""Fixtures that the tests of artifacts share."""

import shutil
from pathlib import Path

import pytest

from tests.support import toy_artifact


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A copy of the toy artifact, ``x.ling3``."""
    return Path(shutil.copytree(toy_artifact.shared(), tmp_path / "x.ling3"))

"""Compile Ling3-Tiny ahead of time: one artifact, any machine, no compiling at start."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from ling3export.opened import Artifact


def open(artifact: "str | Path") -> "Artifact":
    """An artifact on disk: its programs as graphs, as text and as functions. docs/python.md has examples.

    Raises:
        ArtifactError: There is no artifact, or its manifest is damaged.
    """
    from ling3export.opened import Artifact

    return Artifact(artifact)

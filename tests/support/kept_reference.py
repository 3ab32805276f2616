"""Keeps results of the reference between runs, under a digest of its sources, the tensors and the tokens."""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import numpy as np

from ling3export.checkpoint.reader import Checkpoint
from ling3export.machine.environment import cpu_features
from ling3export.verify.formulas import Array, Margins
from ling3export.verify.reference import Reference
from tests.support.artifacts_fixture import Artifacts, digest_of, files_below, kept_folder, sources_of

REFERENCE = "ling3export.verify.reference"


class KeptReference(Reference):
    """The float64 reference for a checkpoint's folder; it computes only what no earlier run computed.

    Args:
        folder: The checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        opened = Checkpoint.open(folder)
        super().__init__(opened.config, opened.tensor)
        self._made_of = [
            sources_of(REFERENCE),
            sources_of("ling3export.checkpoint.reader"),
            digest_of(files_below(folder)),
            metadata.version("numpy"),
            cpu_features(),
        ]

    def logits_many(
        self, sequences: Sequence[Sequence[int]], positions: Sequence[Sequence[int]] | None = None
    ) -> list[Array]:
        """Like the reference's method, including ``margins``."""

        def write(path: Path) -> None:
            path.mkdir()
            found = super(KeptReference, self).logits_many(sequences, positions)
            np.savez(path / "found.npz", *found, margins=np.array(self.margins))

        asked = [list(map(list, sequences)), positions and list(map(list, positions))]
        path = Artifacts(kept_folder()).kept("reference", [*self._made_of, asked], write)
        with np.load(path / "found.npz") as arrays:
            self.margins = Margins(*arrays["margins"].tolist())
            return [arrays[f"arr_{n}"] for n in range(len(sequences))]

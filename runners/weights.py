"""Weights of one target: mapped, not copied, and checked in threads while other things load."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ling3export.artifacts.store import Store
from ling3export.errors import ArtifactError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

CHECKS = ("all", "programs")


class Weights:
    """The weight files of an artifact as a target's parameters.

    Args:
        folder: The artifact.
        manifest: Its manifest.
        target: The manifest's record of the target.

    Raises:
        ArtifactError: A parameter is not in the store, or has another shape or dtype there.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], target: dict[str, Any]) -> None:
        self._store = Store(folder / "weights", manifest["weights"]["index"])
        self._parameters = target["parameters"]
        index = manifest["weights"]["index"]
        for row in self._parameters:
            found = index.get(row["tensor"])
            if found is None or found["shape"] != row["shape"]:
                raise ArtifactError(
                    f"weight `{row['tensor']}`: expected shape {row['shape']}, "
                    f"found {'none' if found is None else found['shape']}, in the weight index",
                    "copy the artifact again, or build it again",
                )

    @property
    def tensors(self) -> list[str]:
        """Names of the tensors that the target uses."""
        return sorted({row["tensor"] for row in self._parameters})

    def check(self, threads: int | None = None) -> None:
        """Compares every slab's digest with the manifest.

        Raises:
            ArtifactError: One differs: names the tensor, the slab and the file.
        """
        self._store.check_many(((name, 0, None) for name in self.tensors), threads)

    def arrays(self, mesh: "Mesh") -> "dict[str, jax.Array]":
        """Every parameter on the devices, by argument. On CPU they are the mapped file: nothing is read."""
        from jax.sharding import NamedSharding, PartitionSpec

        from ling3export.runners.arrays import device_weight

        out = {}
        for row in self._parameters:
            view = self._store.view(row["tensor"])
            if view.dtype.name != row["dtype"]:
                found = view.dtype.name
                raise ArtifactError(
                    f"weight `{row['tensor']}`: expected dtype {row['dtype']}, found {found}, in the weight index"
                )
            if "index" in row:  # one layer of a stack
                view = np.take(view, row["index"], axis=row["axis"]) if row["axis"] else view[row["index"]]
            out[row["argument"]] = device_weight(view, NamedSharding(mesh, PartitionSpec(*row["spec"])))
        return out

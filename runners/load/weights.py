"""Weights of one target: mapped, or copied where that is asked for, and checked in threads while other things load."""

from pathlib import Path
from typing import TYPE_CHECKING

from ling3export.artifacts.schema import Manifest, Target
from ling3export.artifacts.store import Store

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh


class Weights:
    """The weight files of an artifact as a target's parameters.

    Args:
        folder: The artifact.
        manifest: Its manifest.
        target: The one to run.
        host: Which of the target's hosts this process is.
        copied: Whether the files are read into memory instead of mapped.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, target: Target, host: int = 0, *, copied: bool = False
    ) -> None:
        self._store = Store(folder, manifest.weights.index, copied=copied)
        self._target, self._host = target, host

    @property
    def ranges(self) -> list[tuple[str, int, int | None]]:
        """The slabs that this host's devices hold: tensor, first slab, and the slab behind the last (None for all)."""
        return self._target.slabs(self._host)

    @property
    def nbytes(self) -> int:
        """Bytes of those slabs, which are all that this process reads of the weights."""
        index = self._store.index
        return sum(
            index[name].slab_bytes * ((len(index[name].sha256) if stop is None else stop) - start)
            for name, start, stop in self.ranges
        )

    def check(self) -> None:
        """Compares the digest of every slab that this host's devices hold with the manifest, in threads.

        Raises:
            ArtifactError: A digest differs; the message names the tensor, the slab and the file.
        """
        self._store.check_many(self.ranges)

    def arrays(self, mesh: "Mesh") -> "dict[str, jax.Array]":
        """Every parameter on the devices, by the name of the argument. On CPU the arrays are the mapped file."""
        from jax.sharding import NamedSharding, PartitionSpec

        from ling3export.runners.load.model_runner import device_array

        out = {}
        for parameter in self._target.parameters:
            view = self._store.view(parameter.tensor)
            if parameter.axis is not None:  # one layer of a stack; still a view: other hosts' slabs are not read
                view = view[(slice(None),) * parameter.axis + (parameter.index,)]
            out[parameter.argument] = device_array(view, NamedSharding(mesh, PartitionSpec(*parameter.spec)))
        return out

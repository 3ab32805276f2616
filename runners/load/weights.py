"""Weights of one target: mapped, not copied, and checked in threads while other things load."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling3export.artifacts.store import Store
from ling3export.errors import ArtifactError

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh


class Weights:
    """The weight files of an artifact as a target's parameters.

    Args:
        folder: The artifact.
        manifest: Its manifest.
        target: The manifest's record of the target.
        host: Which of the target's hosts this process is.

    Raises:
        ArtifactError: A parameter is not in the store, or has another shape or dtype there.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], target: dict[str, Any], host: int = 0) -> None:
        self._store = Store(folder / "weights", manifest["weights"]["index"])
        self._parameters = target["parameters"]
        self._places = places(target, host)
        self._tp, self._axis = len(target["mesh"]["devices"]), target["mesh"]["axis"]
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

    @property
    def ranges(self) -> list[tuple[str, int, int | None]]:
        """The slabs that this host's devices hold: tensor, first slab, behind the last one (None for all)."""
        found: dict[tuple[str, int, int | None], None] = {}
        for row in self._parameters:
            slabs = row["shape"][0] // self._tp if row["spec"] and row["spec"][0] == self._axis else None
            if slabs is None:
                found[row["tensor"], 0, None] = None
                continue
            for place in self._places:
                found[row["tensor"], place * slabs, (place + 1) * slabs] = None
        whole = {name for name, _, stop in found if stop is None}
        return [part for part in found if part[2] is None or part[0] not in whole]

    @property
    def nbytes(self) -> int:
        """Bytes of those slabs: all of the weights that this process reads."""
        index = self._store.index
        return sum(
            index[name]["slab_bytes"] * ((len(index[name]["sha256"]) if stop is None else stop) - start)
            for name, start, stop in self.ranges
        )

    def check(self, threads: int | None = None) -> None:
        """Compares the digest of every slab that this host's devices hold with the manifest.

        Raises:
            ArtifactError: One differs: names the tensor, the slab and the file.
        """
        self._store.check_many(self.ranges, threads)

    def arrays(self, mesh: "Mesh") -> "dict[str, jax.Array]":
        """Every parameter on the devices, by argument. On CPU they are the mapped file: nothing is read."""
        from jax.sharding import NamedSharding, PartitionSpec

        from ling3export.runners.load.model_runner import device_array

        out = {}
        for row in self._parameters:
            view = self._store.view(row["tensor"])
            if view.dtype.name != row["dtype"]:
                found = view.dtype.name
                raise ArtifactError(
                    f"weight `{row['tensor']}`: expected dtype {row['dtype']}, found {found}, in the weight index"
                )
            if "index" in row:  # one layer of a stack; still a view, so that other hosts' slabs are not read
                view = view[(slice(None),) * row["axis"] + (row["index"],)]
            out[row["argument"]] = device_array(view, NamedSharding(mesh, PartitionSpec(*row["spec"])))
        return out


def places(target: dict[str, Any], host: int) -> list[int]:
    """Places in the target's mesh of the devices of one host."""
    devices = target["mesh"]["devices"]
    own = devices if target["processes"] == 1 else target["hosts"][host]
    return [place for place, device in enumerate(devices) if device in own]

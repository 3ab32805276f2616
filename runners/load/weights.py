"""Weights of one target as parameters on its devices."""

from typing import TYPE_CHECKING

from ling3export.artifacts.schema import Target
from ling3export.artifacts.store import Store

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh


def parameters(store: Store, target: Target, mesh: "Mesh") -> "dict[str, jax.Array]":
    """Every parameter on the devices, by the name of the argument. On CPU the arrays are the mapped file."""
    from jax.sharding import NamedSharding, PartitionSpec

    from ling3export.runners.load.model_runner import device_array

    out = {}
    for parameter in target.parameters:
        view = store.view(parameter.tensor)
        if parameter.axis is not None:  # one layer of a stack; still a view: other hosts' slabs are not read
            view = view[(slice(None),) * parameter.axis + (parameter.index,)]
        out[parameter.argument] = device_array(view, NamedSharding(mesh, PartitionSpec(*parameter.spec)))
    return out

"""The named scopes that the model's programs carry: the kinds of layers, and the loops over layers.

Scopes change no program, only the names in its text. They stand at the functions that they name. Inside a kind stand
scopes of its parts: ``projections``, ``convolution``, ``attention``, ``output``, ``reduce``.
"""

from collections.abc import Mapping

from ling3export.model.config import Config
from ling3export.model.geometry import Geometry

LAYER_KINDS = (
    "embed",
    "kda",
    "mla",
    "norm",
    "router",
    "experts",
    "shared_expert",
    "dense_mlp",
    "logits",
    "sample",
    "state",
)
# The layer kinds of weights, by the beginning of their names, for operations that only move them; the first match.
WEIGHTS = {
    "embeddings.word_embeddings": "embed",
    "embeddings": "logits",
    "kda": "kda",
    "mla": "mla",
    "moe.gate": "router",
    "moe.shared": "shared_expert",
    "moe": "experts",
    "dense": "dense_mlp",
    "layers": "norm",
}
# Around a layer that is traced by itself, and around the body of a loop over layers.
ONE_LAYER = "layer_{}"
LOOPS = {"kda": "layers_kda", "mla": "layers_mla"}


def looped_layers(config: Config, geometry: Geometry) -> Mapping[str, tuple[int, ...]]:
    """The numbers of the layers that the body of a loop runs, by the scope of the loop."""
    looped = 0 if geometry.tiled else config.groups * config.layer_group_size
    return {
        scope: tuple(number for number in range(looped) if config.attention_kinds[number] == kind)
        for kind, scope in LOOPS.items()
    }

"""The arrays of sequence states, and which artifacts can continue from each other's states."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ling3export.artifacts.records import sha256_of
from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import ArtifactError, Ling3Error, listed

LATENT, RECURRENT, CONV, TOKENS = "mla.latent", "kda.recurrent", "kda.conv", "tokens"
POOLS = {LATENT: "mla_latent", RECURRENT: "kda_recurrent", CONV: "kda_conv"}
FORMAT = 2  # of a state's bytes; states of another one are refused

Form = tuple[str, tuple[int, ...], str]  # name, shape and dtype of an array


class StateMismatch(Ling3Error):
    """Two artifacts whose sequences cannot continue from each other's states."""


@dataclass(frozen=True)
class StateLayout:
    """The arrays of a state.

    Attributes:
        latent: The form of one token's latents, ``[layers, width]``.
        recurrent: ``[layers, heads, key, value]``.
        conv: ``[layers, 3 (q, k, v), heads, key, taps]``, the oldest tap first.
        page: Tokens a page of the target's own pools; it decides nothing about the state.
    """

    latent: Form
    recurrent: Form
    conv: Form
    page: int

    def forms(self, tokens: int) -> list[Form]:
        """The arrays of a state with the latents of ``tokens`` tokens, in the order of its bytes; none for no token."""
        if not tokens:
            return []
        name, (layers, width), dtype = self.latent
        return [self.recurrent, (TOKENS, (tokens,), "int32"), (name, (layers, tokens, width), dtype), self.conv]

    def nbytes(self, tokens: int) -> int:
        return sum(nbytes(form) for form in self.forms(tokens) if form[0] != TOKENS)


def nbytes(form: Form) -> int:
    _, shape, dtype = form
    return BY_NAME[dtype].nbytes * math.prod(shape)


def layout_of(target: Target, what: str = "transfer") -> StateLayout:
    """The layout of the states of a target's sequences.

    Raises:
        ArtifactError: It has no programs that move states; ``what`` says who needs them.
    """
    paddings = target.paddings("offload")
    if not paddings:
        raise ArtifactError(
            f"{what}: the artifact has no programs offload and onload", "build the artifact again with --snapshots N"
        )
    leaves = {leaf.name: leaf for leaf in target.cells[f"offload@{paddings[0]}"].outputs if leaf.group == "out"}
    latent, recurrent, conv = (leaves[POOLS[name]] for name in (LATENT, RECURRENT, CONV))
    layers, heads, key = recurrent.shape[:3]
    return StateLayout(
        (LATENT, (latent.shape[0], latent.shape[3]), latent.dtype),
        (RECURRENT, tuple(recurrent.shape), recurrent.dtype),
        (CONV, (layers, 3, heads, key, conv.shape[2] // 3 // key), conv.dtype),
        target.state.page_size,
    )


def description_of(manifest: Manifest, target: Target) -> dict[str, object]:
    """The fields that decide whether states fit; an error names those that differ."""
    config = {name: value for name, value in manifest.config.items() if not name.endswith("token_id")}
    weights = {name: tensor.sha256 for name, tensor in manifest.weights.index.items()}
    layout = layout_of(target)
    return {
        "state_abi": target.state_abi,
        "config": sha256_of(config)[:16],
        "weights": sha256_of(weights)[:16],
        "dtypes": [layout.latent[2], layout.recurrent[2], layout.conv[2]],
        "format": FORMAT,
    }


def root_of(manifest: Manifest, target: Target) -> str:
    """The root of the names of states: artifacts whose weights or layouts differ have different ones."""
    (name,) = (name for name, record in manifest.targets.items() if record is target)
    return sha256_of(manifest.state_of(name))


def check_same_state(mine: Mapping[str, object], theirs: Mapping[str, object]) -> None:
    """Passes where both artifacts may exchange state; the arguments are what ``description_of`` gave.

    Raises:
        StateMismatch: They may not; it names the fields that differ.
    """
    if sha256_of(mine) == sha256_of(theirs):
        return
    names = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
    raise StateMismatch(
        f"state of another artifact: expected the same {listed(names)}, found others",
        "both sides must serve the same weights in the same format; paddings, TP and batch may differ",
    )

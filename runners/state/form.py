"""One sequence's state in canonical order: what connectors, folders and files carry, whatever the TP and the pages."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ling3export.artifacts.records import sha256_of
from ling3export.artifacts.schema import Manifest, Target
from ling3export.foundation.dtypes import BY_NAME
from ling3export.foundation.errors import ArtifactError
from ling3export.runners.load.kept import PAGED, Whole
from ling3export.runners.load.segments import groups_of, rows_of
from ling3export.runners.transfer.objects import Kind, Layout, Piece, state_abi

MOST_LIKELY = 20  # tokens beside the one that was sampled

Token = tuple[int, tuple[float, tuple[tuple[int, float], ...]] | None]  # and what request.Likely says of it


class Carried(NamedTuple):
    """A sequence that comes with its state, or with its tokens alone.

    Attributes:
        tokens: Those that were generated elsewhere, each with what ``request.Likely`` says of it, or None.
        stored: How many positions the state is of.
        state: What ``ModelRunner.store`` takes; None where ``stored`` is 0.
        phases: Milliseconds that it spent elsewhere, by what was done, and since it arrived here; None where nobody
            measured them.
        nbytes: Bytes that were carried.
    """

    tokens: tuple[Token, ...]
    stored: int
    state: Whole | None
    phases: Mapping[str, float] | None = None
    nbytes: int = 0


def layout_of(target: Target, what: str = "transfer") -> Layout:
    """What the objects of a target's sequences hold.

    Raises:
        ArtifactError: It has no programs that move states; ``what`` says who needs them.
    """
    paddings = target.paddings("fetch")
    if not paddings:
        raise ArtifactError(
            f"{what}: expected the programs fetch and store, found none", "build the artifact again with --snapshots N"
        )
    leaves = {leaf.name: leaf for leaf in target.cells[f"fetch@{paddings[0]}"].outputs if leaf.group == "out"}
    latent, recurrent, conv = (leaves[name] for name in (PAGED, "kda_recurrent", "kda_conv"))
    heads, key = recurrent.shape[1:3]
    return Layout(
        (
            Piece("mla.latent", Kind.BLOCK, (latent.shape[3],), latent.dtype),
            Piece("kda.recurrent", Kind.SNAPSHOT, tuple(recurrent.shape[1:]), recurrent.dtype, 0),
            Piece("kda.conv", Kind.SNAPSHOT, (3, heads, key, conv.shape[2] // 3 // key), conv.dtype, 1),
        ),
        {Kind.BLOCK: latent.shape[0], Kind.SNAPSHOT: recurrent.shape[0]},
        heads,
        target.state.page_size,
    )


def layer_groups(manifest: Manifest, target: Target, layout: Layout) -> list[dict[Kind, range]]:
    """The layers of each group of which a connector is told apart: one group where prefill calls are not cut."""
    if target.segments == "none":
        return [all_layers(layout)]
    pools = {Kind.BLOCK: PAGED, Kind.SNAPSHOT: "kda_recurrent"}
    return [{kind: group[pool] for kind, pool in pools.items()} for group in groups_of(manifest, target)]


def description_of(manifest: Manifest, target: Target) -> dict[str, object]:
    """What decides whether states fit, in few words: they name what differs."""
    config = {name: value for name, value in manifest.config.items() if not name.endswith("token_id")}
    weights = {name: tensor.sha256 for name, tensor in manifest.weights.index.items()}
    return {
        "state_abi": target.state_abi,
        "config": sha256_of(config)[:16],
        "weights": sha256_of(weights)[:16],
        "dtypes": [piece.dtype for piece in layout_of(target).pieces],
        "format": 1,
    }


def root_of(manifest: Manifest, target: Target) -> str:
    """What names of states begin with: another one where the form of the state or the weights differ."""
    (name,) = (name for name, each in manifest.targets.items() if each is target)
    return state_abi(manifest.state_of(name))


def empty(layout: Layout, count: int) -> dict[str, np.ndarray]:
    """A sequence's own arrays: one slot, and pages 1 to ``count``."""
    found = {}
    for piece in layout.pieces:
        rows = count + 1 if piece.kind == Kind.BLOCK else 1
        shape = layout.shape(piece, (0, layout.heads), layout.block)
        found[piece.name] = np.zeros((layout.layers[piece.kind], rows, *shape), BY_NAME[piece.dtype].numpy)
    return found


def canonical(layout: Layout, whole: Whole) -> dict[str, np.ndarray]:
    """A sequence's own arrays, filled."""
    own = empty(layout, whole.arrays[PAGED].shape[1])
    fill(layout, own, whole, all_layers(layout))
    return own


def all_layers(layout: Layout) -> dict[Kind, range]:
    """The one group of a target whose prefill calls are one program."""
    return {kind: range(count) for kind, count in layout.layers.items()}


def fill(layout: Layout, own: Mapping[str, np.ndarray], found: Whole, group: Mapping[Kind, range]) -> None:
    """Copies the layers of a group into a sequence's own arrays, from what ``fetch`` or ``slice`` gave.

    A row of the conv state has its taps first, in a program's order.
    """
    conv, recurrent = found.arrays["kda_conv"], found.arrays["kda_recurrent"]
    rows = conv.reshape(*conv.shape[:2], -1, 3, recurrent.shape[2]).transpose(0, 3, 1, 4, 2)
    given = {"mla.latent": found.arrays[PAGED], "kda.recurrent": recurrent[:, None], "kda.conv": rows[:, None]}
    for piece in layout.pieces:
        layers, array, target = group[piece.kind], given[piece.name], own[piece.name]
        there = rows_of(layers, len(array), len(target))
        target[layers.start : layers.stop, target.shape[1] - array.shape[1] :] = array[there]  # page 0 is a dummy


def storable(own: Mapping[str, np.ndarray]) -> Whole:
    """What ``ModelRunner.store`` takes of a sequence's own arrays."""
    conv = own["kda.conv"][:, 0].transpose(0, 2, 4, 1, 3)
    return Whole(
        {
            PAGED: own["mla.latent"][:, 1:],
            "kda_recurrent": own["kda.recurrent"][:, 0],
            "kda_conv": conv.reshape(*conv.shape[:2], -1),
        }
    )


def token_of(token: Any, likely: Any, vocab_size: int) -> Token:
    """A token that another process sampled, and what it said of it.

    Raises:
        LookupError, TypeError, ValueError: It has another form.
    """
    if type(token) is not int or not 0 <= token < vocab_size:
        raise ValueError("a token outside of the vocabulary")
    if likely is None:
        return token, None
    try:
        logprob, top = likely
        return token, (float(logprob), tuple((int(each), float(value)) for each, value in top[:MOST_LIKELY]))
    except OverflowError as error:
        raise ValueError("a number that is none") from error

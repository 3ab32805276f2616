"""The programs that move one sequence's state: ``copy`` within the pools, ``offload`` out of them, ``onload`` into
them.

They compute nothing, so an onloaded state is offloaded again bit for bit. An offloaded state has the order of the whole
sequence, whatever the parallelism: heads 0 to H-1 in order, latents without the padding of their rows. A device gives
and takes its own range of heads, as its pools have them, and all of a page that it holds.

Pairs of slots, and pages, are moved one after the other: XLA:CPU takes ten times longer to gather and scatter whole
states, and padding is not moved at all. Only accelerators offload all pages of a call at once, zeros for padding.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from ling3export.foundation.phases import PAGED
from ling3export.model.geometry import AXIS, Geometry
from ling3export.model.mla.paged import local_pages

Tree = dict[str, Any]


@jax.named_scope("state")
def copy(model: Any, state: Tree, fields: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Copies slot ``source[n]`` over slot ``target[n]``, one pair after the other; 0 to 0 is padding."""
    source, target = fields["source"], fields["target"]

    def step(n: jax.Array, state: Tree) -> Tree:
        return {name: _set(pool, target[n], _at(pool, source[n])) for name, pool in state.items()}

    with jax.named_scope("copies"):
        return lax.fori_loop(0, _used(target), step, state), {}


@jax.named_scope("state")
def offload(model: Any, state: Tree, fields: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """The state of ``slot`` and the latents of ``page[P]``; zeros in the place of a page 0."""
    slot, out = fields["slot"][0], {}
    for name in state:
        if name == PAGED:
            pages_out = _pages_at_once if model.geometry.tiled else _pages_out
            out[name] = pages_out(state[name], _local(fields["page"], model.geometry), model.config.latent_dim)
        else:
            out[name] = jnp.squeeze(_at(state[name], slot), 1)
    return state, out


@jax.named_scope("state")
def onload(model: Any, state: Tree, fields: Tree, batch: Tree) -> tuple[Tree, Tree]:
    """Writes what ``offload`` gave into ``slot`` and ``page[P]``; nothing is written for a page 0."""
    slot, after = fields["slot"][0], {}
    for name, pool in state.items():
        if name == PAGED:
            after[name] = _pages_in(pool, _local(fields["page"], model.geometry), batch[name])
        else:
            after[name] = _set(pool, slot, batch[name][:, None])
    return after, {}


def _page(pool: jax.Array, number: jax.Array, width: int) -> jax.Array:
    return jnp.where(number > 0, _at(pool, number)[..., :width], jnp.zeros((), pool.dtype))


def _pages_at_once(pool: jax.Array, page: jax.Array, width: int) -> jax.Array:
    """For XLA:TPU, which moves twice the bytes where a loop writes the pages (docs/log/programs-tpu.md)."""
    return jnp.concatenate([_page(pool, page[n], width) for n in range(page.shape[0])], axis=1)


def _pages_out(pool: jax.Array, page: jax.Array, width: int) -> jax.Array:
    def step(n: jax.Array, out: jax.Array) -> jax.Array:
        return _set(out, n, _page(pool, page[n], width))

    out = jnp.zeros((pool.shape[0], page.shape[0], pool.shape[2], width), pool.dtype)
    with jax.named_scope("pages"):
        return lax.fori_loop(0, _used(page), step, out)


def _pages_in(pool: jax.Array, page: jax.Array, latents: jax.Array) -> jax.Array:
    padded = jnp.pad(latents, ((0, 0), (0, 0), (0, 0), (0, pool.shape[-1] - latents.shape[-1])))

    def step(n: jax.Array, pool: jax.Array) -> jax.Array:
        return _set(pool, page[n], _at(padded, n))

    with jax.named_scope("pages"):
        return lax.fori_loop(0, _used(page), step, pool)


def _local(page: Int32[Array, "P"], geometry: Geometry) -> Int32[Array, "L"]:
    """This device's part of a list of pages, as local page numbers."""
    if geometry.striped:
        count = page.shape[0] // geometry.tp
        page = lax.dynamic_slice_in_dim(page, lax.axis_index(AXIS) * count, count)
    return local_pages(page, geometry)[1]


def _used(numbers: Int32[Array, "N"]) -> Int32[Array, ""]:
    """One past the last that is not padding."""
    return jnp.max(jnp.where(numbers > 0, jnp.arange(1, numbers.shape[0] + 1, dtype=jnp.int32), 0))


def _at(pool: jax.Array, number: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(pool, number, 1, axis=1)


def _set(pool: jax.Array, number: jax.Array, value: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(pool, value, number, axis=1)

"""Pages of the latent pool: which device holds one, and which of them a decode step attends.

``striped``: page number n lies on device (n - 1) % TP, as its local page (n - 1) // TP + 1; local page 0 is each
device's dummy. Any page may be anywhere, so whoever hands out pages needs no rule, and numbers that are handed out in
order spread a sequence over all devices.

``by_sequence``: with P pages a device, number n lies on device (n - 1) // P, as local page (n - 1) % P + 1. The pages
of a sequence must all be on the device that attends its row of the batch.

A decode step lists the (row, page) pairs that this device holds; ``attend.py`` walks the list in tiles. So its time
follows what the sequences hold, whatever their number and lengths, and a device reads each cached byte once for all
heads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ling3export.model.geometry import AXIS, Geometry

TILE = 16  # pages attended at once: 8 cost 12 small operations as often again (docs/log.md)


class PageList(NamedTuple):
    """The pages that this device attends in a decode step, those of live rows first.

    Attributes:
        row: ``[X]`` int32, which sequence of the batch.
        page: ``[X]`` int32, local page number, 0 past the end.
        length: ``[X]`` int32, tokens of the page that count, 0 past the end.
        tiles: int32 scalar, how many tiles of :data:`TILE` hold pages.
    """

    row: jax.Array
    page: jax.Array
    length: jax.Array
    tiles: jax.Array


def local_pages(number: jax.Array, geometry: Geometry) -> tuple[jax.Array, jax.Array]:
    """(whether this device holds each page, its local number, 0 where it does not); page 0 is nobody's."""
    if geometry.placement == "replicated":
        return number > 0, number
    if geometry.placement == "striped":
        device, place = (number - 1) % geometry.tp, (number - 1) // geometry.tp
    else:
        each = geometry.pages // geometry.tp
        device, place = (number - 1) // each, (number - 1) % each
    here = (number > 0) & (device == lax.axis_index(AXIS))
    return here, jnp.where(here, place + 1, 0)


class OwnRows(NamedTuple):
    """The rows of a decode batch that this device attends under ``by_sequence``.

    Attributes:
        row: ``[R]`` int32, R the most rows that a device has.
        mine: ``[R]`` bool, False where this device has fewer.
        place: ``[B]`` int32, where in ``row`` each row of the batch is; -1 for those of other devices.
    """

    row: jax.Array
    mine: jax.Array
    place: jax.Array


def own_rows(count: int, devices: int, fewest: int) -> OwnRows:
    """Row r of ``count`` is on device ``r * devices // count``; at least ``fewest`` rows, those at the end nobody's."""
    device = lax.axis_index(AXIS)
    first = (device * count + devices - 1) // devices
    row = first + jnp.arange(max(fewest, -(-count // devices)), dtype=jnp.int32)
    mine = (row < count) & (row * devices // count == device)
    every = jnp.arange(count, dtype=jnp.int32)
    place = jnp.where(every * devices // count == device, every - first, -1)
    return OwnRows(jnp.minimum(row, count - 1), mine, place)


def list_pages(position: jax.Array, table: jax.Array, valid: jax.Array, geometry: Geometry) -> PageList:
    """Lists what a decode step attends: every page up to each row's position.

    Args:
        position: ``[B]`` int32, of the token that decodes.
        table: ``[B, M]`` int32 page numbers.
        valid: ``[B]`` bool.
        geometry: Placement and page size.
    """
    rows, columns = table.shape
    page = geometry.page_size
    seen = jnp.where(valid, position + 1, 0)[:, None] - jnp.arange(columns, dtype=jnp.int32) * page
    here, local = local_pages(table, geometry)
    mine = (here & (seen > 0)).reshape(-1)
    count = rows * columns
    order = jnp.sort(jnp.where(mine, jnp.arange(count, dtype=jnp.int32), count))
    order = jnp.pad(order, (0, -count % TILE), constant_values=count)
    live = order < count
    at = jnp.where(live, order, 0)
    return PageList(
        row=at // columns,
        page=jnp.where(live, local.reshape(-1)[at], 0),
        length=jnp.where(live, jnp.minimum(seen, page).reshape(-1)[at], 0),
        tiles=(jnp.sum(mine, dtype=jnp.int32) + TILE - 1) // TILE,
    )

"""``ling3export cache``: what is in the cache, whether an artifact's cells are, and making room."""

import click


@click.group()
def cache() -> None:
    """Programs that earlier builds compiled."""

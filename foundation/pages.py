"""The page that those of several commands extend, and how their templates are read."""

from pathlib import Path

import jinja2

SHARED = Path(__file__).parent / "templates"


def template(folder: Path, name: str, **filters: object) -> jinja2.Template:
    """A template of a folder, which may extend ``page.html``. What it is given is escaped."""
    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader((folder, SHARED)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    engine.filters.update(filters)
    return engine.get_template(name)

"""Options of commands that sample: the same bounds, defaults and words as in Python and over HTTP."""

from collections.abc import Callable
from typing import Any

import click

from ling3export.runners.engine.request import BOUNDS, Sampling

DEFAULTS = Sampling()


class Setting(click.ParamType):
    """A number within the bounds of a setting of the sampling.

    Args:
        name: Of the field of Sampling.
    """

    def __init__(self, name: str) -> None:
        self._bounds = BOUNDS[name]
        self._type = click.INT if self._bounds.whole else click.FLOAT
        self.name = self._type.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number, or a usage error."""
        number: float = self._type.convert(value, param, ctx)
        if not self._bounds.hold(number):
            self.fail(f"expected {self._bounds}, found {number}.", param, ctx)
        return number


def sampling_option(name: str, text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--temperature`` and its like.

    Args:
        name: Of the field of Sampling.
        text: Help.
    """
    default = getattr(DEFAULTS, name)
    return click.option(
        f"--{name.replace('_', '-')}", type=Setting(name), default=default, show_default=True, help=text
    )

"""The engine: requests in, tokens out, over the slots and pages of an artifact's pools."""

from ling3export.runners.engine.engine import Engine

__all__ = ["Engine"]

"""The engine: requests in, tokens out, over the slots and pages of an artifact's pools."""

from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.handle import EngineStalled, EngineStopped, LogitsError
from ling3export.runners.engine.request import Completion, Request, Sampling

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStalled",
    "EngineStopped",
    "LogitsError",
    "Request",
    "Sampling",
]

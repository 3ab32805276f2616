"""The settings of engines and servers: each has an option, and what they cannot have is refused."""

import dataclasses

import pytest

from ling3export.foundation.errors import RequestError
from ling3export.runners.cli import options
from ling3export.runners.cli.main import main
from ling3export.runners.engine.config import EngineConfig
from ling3export.runners.serve.config import ServerConfig


def test_every_setting_of_an_engine_and_of_a_server_has_an_option():
    """Or stands in the list of those that have none."""
    composed = ("prefix_store", "transfer")
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields == {*options.ENGINE, *composed, *options.PYTHON_ONLY}
    serving = {param.name for param in main.commands["serve"].params}
    assert serving >= {*options.ENGINE} | {field.name for field in dataclasses.fields(ServerConfig)}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"check": "none"}, "check: expected one of all, programs, copy, found none"),
        ({"programs": "any"}, "programs: expected one of prebuilt-only, allow-compile, found any"),
        ({"max_requests": -1}, "max_requests: expected a whole number from 0 to 2147483647, found -1"),
        ({"linger": -1}, "linger: expected a number from 0 to"),
        ({"ffn_timeout": 0}, "ffn_timeout: expected a number above 0"),
    ],
)
def test_a_setting_that_an_engine_cannot_have_is_refused(settings, said):
    with pytest.raises(RequestError, match=f"^{said}"):
        EngineConfig(**settings)

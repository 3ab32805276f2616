"""What the tests of the runner share."""

from collections.abc import Iterator

import pytest

from ling3export.runners.engine.engine import Engine
from tests.support import toy_artifact


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The toy artifact's, with the options that the module has as OPTIONS_OF_ENGINE."""
    options = getattr(request.module, "OPTIONS_OF_ENGINE", {})
    with Engine(toy_artifact.shared(), report=lambda text: None, **options) as engine:
        yield engine

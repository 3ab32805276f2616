"""Fixtures that the runner's tests share."""

from collections.abc import Iterator

import pytest

from ling3export.runners.engine.engine import Engine
from tests.support import toy_artifact


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine of the toy artifact. A module sets its options with OPTIONS_OF_ENGINE."""
    options = getattr(request.module, "OPTIONS_OF_ENGINE", {})
    with Engine(toy_artifact.shared(), report=lambda text: None, **options) as engine:
        yield engine

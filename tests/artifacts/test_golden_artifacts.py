"""Artifacts that earlier versions built still load, and generate the tokens that those versions generated."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from ling3export.runners.engine.engine import Engine

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = ("format-1",)  # commit a8e8325


@pytest.fixture(scope="module", params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """The unpacked artifact, and what its own version made of it."""
    folder = tmp_path_factory.mktemp("golden")
    with tarfile.open(GOLDEN / f"{request.param}.ling3.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    said = json.loads((GOLDEN / f"{request.param}.tokens.json").read_text())
    return folder / f"{request.param}.ling3", said


def test_an_old_artifact_gives_the_tokens_of_its_own_version(golden: tuple[Path, dict]) -> None:
    """Where its executables do not fit (they hold for one jaxlib and processor), the portable programs are compiled."""
    folder, said = golden
    with Engine(folder, programs="allow-compile") as engine:
        for each in said["completions"]:
            count = len(each["tokens"])
            (completion,) = engine.generate([each["prompt"]], max_tokens=count, ignore_eos=True)
            assert completion.token_ids == each["tokens"], each["prompt"]
        (score,) = engine.score([(said["scored"]["context"], said["scored"]["continuation"])])
        np.testing.assert_allclose(score.logprobs, said["scored"]["logprobs"], rtol=0, atol=1e-4)

"""An artifact built by the oldest supported jax (from `make parity`) runs with this jax by its portable programs."""

import json

import jax
import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.foundation.errors import MisfitError
from ling3export.runners.engine.engine import Engine
from tests.support.artifacts_fixture import Artifacts, run
from tests.support.transformers_peer import parity_python

pytestmark = pytest.mark.extras

OPTIONS = """--tp 1 --dtype float32 --paddings 16 --decode-paddings 1 --max-running 2 --context 64 --page-size 16
    --pages 8 --snapshots 2 --kernels off""".split()


def test_an_artifact_built_with_jax_0_10_2_loads_by_its_portable_tier(artifact: Artifacts, tmp_path):
    """Tokens and log-probabilities are those that the artifact gave with the jax that built it."""
    old, folder = parity_python(), tmp_path / "old.ling3"
    run(old, "-m", "ling3export.cli", "build", artifact.checkpoint("micro-tp1"), folder, *OPTIONS)
    (target,) = read_manifest(folder).targets.values()
    assert (target.toolchain["jax"], target.portable) == ("0.10.2", "1.15.0")
    if jax.__version__ == target.toolchain["jax"]:
        pytest.skip("this interpreter has the oldest supported jax itself")
    asked = ["--prompt-ids", "1,2,3", "--max-tokens", "8", "--json", "--logprobs", "1"]
    said = json.loads(run(old, "-m", "ling3export.runners.cli", "generate", folder, *asked).stdout)
    with pytest.raises(MisfitError, match=r"found RECOMPILE .*jaxlib"):
        Engine(folder)
    with Engine(folder, programs="allow-compile", report=lambda line: None) as engine:
        (done,) = engine.generate([[1, 2, 3]], max_tokens=8, logprobs=1)
    assert done.token_ids == said["token_ids"]
    assert done.logprobs is not None
    found, expected = [each.logprob for each in done.logprobs], [each["logprob"] for each in said["logprobs"]]
    assert len(found) == 8 and found == pytest.approx(expected, abs=1e-4)

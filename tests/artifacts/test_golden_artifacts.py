"""Artifacts that earlier versions built still load, and generate the tokens that those versions generated."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from ling3export.artifacts.manifest import read_manifest
from ling3export.artifacts.schema import Collective
from ling3export.runners.engine.engine import Engine

pytestmark = pytest.mark.jit

GOLDEN = Path(__file__).parents[1] / "golden"
VERSIONS = ("format-1", "format-2")  # format 1: commit a8e8325


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


def test_an_old_manifest_of_every_kind_of_target_is_read() -> None:
    """Two hosts and a slice, with estimates: every value passes the types of today, device ids stand once."""
    manifest = read_manifest(GOLDEN / "format-1-targets")
    assert list(manifest.targets) == ["cpu-2x1-tp2", "cpu-tp2", "tpu-v6e-2x2-tp4"]
    hosts, here, slice_ = manifest.targets.values()
    assert (hosts.text, hosts.mesh.devices, hosts.mesh.hosts, hosts.processes) == ("cpu:2x1", (0, 2048), (0, 1), 2)
    assert (here.mesh.devices, here.mesh.hosts, here.tp) == ((0, 1), (0, 0), 2)
    assert (slice_.text, slice_.mesh.devices, slice_.mesh.hosts) == ("tpu:v6e:2x2", (0, 1, 3, 2), (0, 0, 0, 0))
    cell = slice_.cells["decode@2"]
    assert (cell.rows, cell.packed, cell.status) == (2, 14, "compiled, not executed")
    assert cell.estimated_seconds == pytest.approx(2.00874e-4, rel=1e-5)
    assert cell.collectives["all-reduce"] == Collective(9, 18432)
    assert here.cells["decode@2"].collectives == {"all_reduce": Collective(5)}
    assert manifest.vectors.receipts["cpu-tp2"].passed
    assert manifest.weights.index["dense.down_proj"].file == "weights/dense.safetensors"
    assert manifest.weights.nbytes == sum(manifest.weights.files.values())


def test_temperatures_that_old_sample_programs_get_wrong_are_taken_as_0(golden: tuple[Path, dict]) -> None:
    """At 1e-9 those of format 1 took token 0; the engine says so, once, where a request asks for it."""
    folder, said = golden
    lines: list[str] = []
    with Engine(folder, programs="allow-compile", report=lines.append) as engine:
        for each in said["completions"]:
            (completion,) = engine.generate([each["prompt"]], max_tokens=3, temperature=1e-4, top_p=0.9)
        assert not [line for line in lines if "temperature" in line]
        for each in said["completions"]:
            count = len(each["tokens"])
            options = {"max_tokens": count, "ignore_eos": True, "temperature": 1e-9, "top_p": 0.9}
            (completion,) = engine.generate([each["prompt"]], **options)
            assert completion.token_ids == each["tokens"], each["prompt"]
        (line,) = (line for line in lines if "temperature" in line)
    assert line.startswith("temperatures below 1e-06 are taken as 0: the sample programs of this artifact")

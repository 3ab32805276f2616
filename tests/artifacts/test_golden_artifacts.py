"""Artifacts that earlier versions built still load, and generate the tokens that those versions generated."""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from ling3export.artifacts.manifest import MANIFEST, read_manifest
from ling3export.artifacts.older import with_phases_of_today
from ling3export.artifacts.program_records import Collective
from ling3export.foundation.errors import ArtifactError
from ling3export.runners.engine.engine import Engine
from ling3export.runners.engine.request import Request
from tests.support import toy_artifact
from tests.support.manifests import crafted

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


def test_phases_under_their_earlier_names_are_those_of_today(tmp_path: Path) -> None:
    """``adjust``, ``fetch``, ``store`` and ``slice`` stood in manifests, in names of cells and in receipts."""
    folder = shutil.copytree(toy_artifact.shared(), tmp_path / "toy.ling3")
    today = read_manifest(folder)
    crafted(folder, _with_earlier_names)
    assert b'logits_processor@1"' not in (folder / MANIFEST).read_bytes()
    manifest = read_manifest(folder)
    assert (manifest.targets, manifest.vectors) == (today.targets, today.vectors)
    with Engine(folder) as engine:
        (completion,) = engine.complete([Request((1, 2, 3), 1, ignore_eos=True, logprobs=2, name="x")])
    ids, logits = toy_artifact.answer([1, 2, 3], 1)
    assert completion.token_ids == ids
    assert completion.likely is not None
    assert [each for each, _ in completion.likely[0].top] == list(np.argsort(-logits[0], kind="stable")[:2])
    for earlier, name in {"fetch": "offload", "store": "onload", "slice": "offload_group"}.items():
        raw = {"vectors": {"receipts": {"cpu-tp1": {"cells": {f"{earlier}@8": {"status": "passed"}}}}}}
        assert with_phases_of_today(raw)["vectors"]["receipts"]["cpu-tp1"]["cells"].keys() == {f"{name}@8"}
        cell = {"phase": earlier, "stablehlo": {"path": f"programs/cpu-tp1/{earlier}@8.stablehlo"}}
        raw = {"targets": {"cpu-tp1": {"cells": {f"{earlier}@8": cell}}}}
        assert with_phases_of_today(raw)["targets"]["cpu-tp1"]["cells"] == {f"{name}@8": cell | {"phase": name}}


def _with_earlier_names(raw: dict) -> None:
    for target in raw["targets"].values():
        for name in [name for name in target["cells"] if name.startswith("logits_processor@")]:
            target["cells"][name.replace("logits_processor", "adjust")] = target["cells"].pop(name) | {
                "phase": "adjust"
            }
    for receipts in raw["vectors"]["receipts"].values():
        for name in [name for name in receipts["cells"] if name.startswith("logits_processor@")]:
            receipts["cells"][name.replace("logits_processor", "adjust")] = receipts["cells"].pop(name)


def test_min_p_is_refused_by_an_artifact_whose_sample_programs_have_none(golden: tuple[Path, dict]) -> None:
    """A min_p of 0 asks for nothing, and their tokens are drawn as before."""
    folder, said = golden
    with Engine(folder, programs="allow-compile") as engine:
        (first, second) = (
            engine.generate([said["completions"][0]["prompt"]], max_tokens=2, temperature=1.0, seed=3, **how)
            for how in ({}, {"min_p": 0.0})
        )
        assert first[0].token_ids == second[0].token_ids
        wanted = "prompt 0: expected sample programs with `min_p` in target `.*`, found none"
        with pytest.raises(ArtifactError, match=wanted):
            engine.generate([[1]], max_tokens=1, temperature=1.0, min_p=0.1)


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

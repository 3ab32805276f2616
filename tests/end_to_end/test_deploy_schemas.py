"""The manifests of deploy/ against published schemas: kubernetes-validate's, and kubeflow-trainer-api's of JobSet.

No package has the schema of LeaderWorkerSet: test_deploy.py checks its own fields, and its pods are checked here.
"""

from typing import Any

import pytest
import yaml

from artifacts_fixture import ROOT

pytestmark = pytest.mark.install  # in the extra `deploy`
RELEASE = "1.37"  # of Kubernetes


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text()))


def known(value: dict[str, Any]) -> list[dict[str, Any]]:
    """What of a document Kubernetes itself has a schema for."""
    if value["kind"] == "JobSet":
        templates = [row["template"] for row in value["spec"]["replicatedJobs"]]
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **each} for each in templates]
    if value["kind"] == "LeaderWorkerSet":
        pods = value["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        return [{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pods}]
    return [value]


def lost(value: Any, kept: Any, at: str = "") -> list[str]:
    """What of ``value`` is not in ``kept``."""
    if isinstance(value, dict) and isinstance(kept, dict):
        return [bad for key in value for bad in lost(value[key], kept.get(key), f"{at}.{key}")]
    if isinstance(value, list) and isinstance(kept, list) and len(value) == len(kept):
        return [bad for n, pair in enumerate(zip(value, kept, strict=True)) for bad in lost(*pair, f"{at}[{n}]")]
    return [] if value == kept else [at]


NAMES = sorted(path.name for path in (ROOT / "deploy").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_manifests_follow_the_schemas_of_kubernetes(name):
    validate = pytest.importorskip("kubernetes_validate").validate
    checked = [validate(each, RELEASE, strict=True) for value in documents(name) for each in known(value)]
    assert len(checked) >= 1


def test_the_schemas_find_what_is_wrong():
    kubernetes = pytest.importorskip("kubernetes_validate")
    (job,) = known(documents("jobset-v6e-4x4.yaml")[0])
    job["spec"]["paralellism"] = job["spec"].pop("parallelism")
    with pytest.raises(kubernetes.ValidationError, match="paralellism"):
        kubernetes.validate(job, RELEASE, strict=True)


def test_the_jobset_is_one():
    """A field that the API does not have would be gone behind its model, and a wrong type refused."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (value,) = documents("jobset-v6e-4x4.yaml")
    read = models.JobsetV1alpha2JobSet.from_dict
    assert lost(value, read(value).to_dict()) == []
    value["spec"]["replicatedJobs"][0]["replica"] = 3
    assert lost(value, read(value).to_dict()) == [".spec.replicatedJobs[0].replica"]
    value["spec"]["replicatedJobs"][0]["replicas"] = "many"
    with pytest.raises(ValueError, match="replicas"):
        read(value)

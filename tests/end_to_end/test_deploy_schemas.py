"""The manifests of deploy/ against published schemas: kubernetes-validate's, and kubeflow-trainer-api's of JobSet.

No package has the schema of LeaderWorkerSet. The fields in LWS come from its API reference, and were compared with the
published definition of v0.9.0 (docs/log/fleet.md). Its pods are checked as pods of Kubernetes.
"""

import copy
import functools
from typing import Any

import pytest
import yaml

from tests.support.artifacts_fixture import ROOT

pytestmark = pytest.mark.extras
RELEASE = "1.37"  # version of Kubernetes


def closed(*required: str, **properties: Any) -> dict[str, Any]:
    """The JSON schema of an object without further properties."""
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


WHOLE, POD, SHARE = {"type": "integer"}, {"type": "object"}, {"type": ["integer", "string"]}
# The fields that users set in a LeaderWorkerSet v1; a default stands for a field that the API requires and fills in.
LWS = closed(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    metadata={"type": "object"},
    spec=closed(
        "leaderWorkerTemplate",
        replicas={"type": "integer", "minimum": 0, "maximum": 1_000_000},
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"], "default": "LeaderCreated"},
        networkConfig=closed("subdomainPolicy", subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
        rolloutStrategy=closed(
            type={"enum": ["RollingUpdate"], "default": "RollingUpdate"},
            rollingUpdateConfiguration=closed(partition=WHOLE, maxUnavailable=SHARE, maxSurge=SHARE),
        ),
        leaderWorkerTemplate=closed(
            "workerTemplate",
            leaderTemplate=POD,
            workerTemplate=POD,
            size=WHOLE,
            restartPolicy={"enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            subGroupPolicy=closed(subGroupSize=WHOLE, subGroupPolicyType={"enum": ["LeaderWorker", "LeaderExcluded"]}),
            volumeClaimTemplates={"type": "array"},
            persistentVolumeClaimRetentionPolicy={"type": "object"},
        ),
    ),
)


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text()))


def known(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a document for which Kubernetes itself has a schema."""
    if value["kind"] == "JobSet":
        templates = [row["template"] for row in value["spec"]["replicatedJobs"]]
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **each} for each in templates]
    if value["kind"] == "LeaderWorkerSet":
        template = value["spec"]["leaderWorkerTemplate"]
        pods = [template[name] for name in ("leaderTemplate", "workerTemplate") if name in template]
        return [{"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": pod} for pod in pods]
    return [value]


def lost(value: Any, kept: Any, at: str = "") -> list[str]:
    """Paths of values in ``value`` that ``kept`` does not have."""
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
    """The model drops a field that the API does not have, and refuses a wrong type."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (value,) = documents("jobset-v6e-4x4.yaml")
    read = models.JobsetV1alpha2JobSet.from_dict
    assert lost(value, read(value).to_dict()) == []
    value["spec"]["replicatedJobs"][0]["replica"] = 3
    assert lost(value, read(value).to_dict()) == [".spec.replicatedJobs[0].replica"]
    value["spec"]["replicatedJobs"][0]["replicas"] = "many"
    with pytest.raises(ValueError, match="replicas"):
        read(value)


WRONG = (
    (("spec", "replica"), 2, "'replica' was unexpected"),
    (("spec", "replicas"), -1, "-1 is less than the minimum"),
    (("spec", "leaderWorkerTemplate", "size"), "4", "'4' is not of type 'integer'"),
    (("spec", "leaderWorkerTemplate", "restartPolicy"), "Never", "'Never' is not one of"),
    (("spec", "rolloutStrategy"), {"maxSurge": 1}, "'maxSurge' was unexpected"),
    (("apiVersion",), "leaderworkerset.x-k8s.io/v1alpha1", "was expected"),
)


def test_the_leaderworkersets_are_some():
    jsonschema = pytest.importorskip("jsonschema")
    found = [value for name in NAMES for value in documents(name) if value["kind"] == "LeaderWorkerSet"]
    assert found
    for value in found:
        jsonschema.validate(value, LWS)
    for path, wrong, message in WRONG:
        value = copy.deepcopy(found[0])
        functools.reduce(dict.__getitem__, path[:-1], value)[path[-1]] = wrong
        with pytest.raises(jsonschema.ValidationError, match=message):
            jsonschema.validate(value, LWS)

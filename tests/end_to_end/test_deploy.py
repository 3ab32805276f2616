"""deploy/jobset-v6e-4x4.yaml against the fields that it uses."""

from pathlib import Path
from typing import Any

import yaml

from ling3export.checkpoint.synth import config_fields
from ling3export.model.config import Config
from ling3export.plan.chips import CHIPS
from ling3export.plan.targets import parse_target

ROOT = Path(__file__).parents[2]
JOBSET = ROOT / "deploy/jobset-v6e-4x4.yaml"
TARGET = parse_target("tpu:v6e:4x4", None, Config.from_dict(config_fields("full", {})))

# What it holds, by the references of JobSet v1alpha2, batch/v1 Job and v1 Pod: a mapping of field to schema, a
# list of one schema for every item, a tuple of schemas of which one holds, or a type. Every field is required; `...` as
# a key allows any.
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [
        ({"name": str, "value": str}, {"name": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}),
    ],
    "ports": [{"containerPort": int}],
    "resources": {"requests": {"google.com/tpu": str}, "limits": {"google.com/tpu": str}},
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
}
POD = {
    "restartPolicy": str,
    "nodeSelector": {"cloud.google.com/gke-tpu-accelerator": str, "cloud.google.com/gke-tpu-topology": str},
    "containers": [CONTAINER],
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str, "readOnly": bool}}],
}
JOB = {
    "parallelism": int,
    "completions": int,
    "completionMode": str,
    "backoffLimit": int,
    "template": {"spec": POD},
}
SCHEMA = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "annotations": {...: str}},
    "spec": {
        "network": {"enableDNSHostnames": bool},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}


def misfits(value: Any, schema: Any, at: str = "") -> list[str]:
    """Where ``value`` is not what ``schema`` says."""
    if isinstance(schema, type):
        return [] if type(value) is schema else [f"{at}: {type(value).__name__}"]
    if isinstance(schema, tuple):
        return min((misfits(value, each, at) for each in schema), key=len)
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{at}: no list of something"]
        return [bad for n, item in enumerate(value) for bad in misfits(item, schema[0], f"{at}[{n}]")]
    if not isinstance(value, dict):
        return [f"{at}: {type(value).__name__}"]
    if ... in schema:
        return [bad for key, item in value.items() for bad in misfits(item, schema[...], f"{at}.{key}")]
    wrong = [f"{at}.{key}" for key in sorted(schema.keys() ^ value.keys())]
    return wrong + [
        bad for key in schema.keys() & value.keys() for bad in misfits(value[key], schema[key], f"{at}.{key}")
    ]


def test_the_jobset_has_the_fields_that_it_needs_and_no_others():
    assert misfits(yaml.safe_load(JOBSET.read_text()), SCHEMA) == []


def test_the_check_finds_what_is_wrong():
    manifest = yaml.safe_load(JOBSET.read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["paralellism"] = job.pop("parallelism")
    job["template"]["spec"]["containers"][0]["env"][0]["value"] = 4
    at = ".spec.replicatedJobs[0].template.spec"
    assert misfits(manifest, SCHEMA) == [
        f"{at}.paralellism",
        f"{at}.parallelism",
        f"{at}.template.spec.containers[0].env[0].value: int",
    ]


def test_the_jobset_asks_for_the_hosts_and_chips_of_the_target():
    manifest = yaml.safe_load(JOBSET.read_text())
    runner = manifest["spec"]["replicatedJobs"][0]
    job = runner["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    chip = CHIPS["tpu", "v6e"]
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job["completionMode"] == "Indexed"  # else pods have no number
    assert job["parallelism"] == job["completions"] == TARGET.processes == 4
    assert container["resources"]["limits"] == {"google.com/tpu": str(chip.chips_per_host)}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == TARGET.topology
    environment = {row["name"]: row.get("value") for row in container["env"]}
    assert environment["NNODES"] == str(TARGET.processes)
    assert environment["LING3_SECRET"] is None  # from a secret of the cluster
    host, port = environment["DIST_INIT_ADDR"].split(":")
    name = manifest["metadata"]["name"]
    assert host == f"{name}-{runner['name']}-0-0.{name}"
    assert [row["containerPort"] for row in container["ports"]] == [int(port)]
    assert f"--target {TARGET.name} " in container["args"][0]
    assert [row["name"] for row in container["volumeMounts"]] == [row["name"] for row in pod["volumes"]]

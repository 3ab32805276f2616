"""The manifests of deploy/: the names in them exist, and their containers run our commands.

test_deploy_schemas.py compares their fields with published schemas.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ling3export.checkpoint.synth import config_fields
from ling3export.cost.chips import CHIPS
from ling3export.model.config import Config
from ling3export.plan.targets import parse_target
from ling3export.runners.cli.main import main
from tests.support.builds import environment
from tests.support.refusals import said

ROOT = Path(__file__).parents[2]
FULL = Config.from_dict(config_fields("full", {}))
TARGETS = {name: parse_target(f"tpu:v6e:{name}", None, FULL) for name in ("4x4", "2x2")}

# Environment variables that the controllers set in a container, by file.
GIVEN = {
    "jobset-v6e-4x4.yaml": {"JOB_COMPLETION_INDEX": "2", "JOB": "5", "NNODES": "4"},
    "leaderworkerset-v6e-4x4.yaml": {
        "LWS_GROUP_SIZE": "4",
        "LWS_WORKER_INDEX": "2",
        "LWS_LEADER_ADDRESS": "ling3-1.ling3.default",
    },
    "deployment-v6e-2x2.yaml": {},
    "job-shards.yaml": {"JOB_COMPLETION_INDEX": "63"},
}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((ROOT / "deploy" / name).read_text()))


def pod_of(name: str) -> Any:
    spec = documents(name)[0]["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    template = spec["leaderWorkerTemplate"]["workerTemplate"] if "leaderWorkerTemplate" in spec else spec["template"]
    return template["spec"]


def container_of(name: str) -> Any:
    (container,) = pod_of(name)["containers"]
    return container


@pytest.mark.parametrize("name", GIVEN)
def test_names_in_a_manifest_exist(name):
    """Volumes and ports by name and number; chips and topology by the target."""
    pod, container = pod_of(name), container_of(name)
    assert [row["name"] for row in container["volumeMounts"]] == [row["name"] for row in pod["volumes"]]
    if "nodeSelector" in pod:
        topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
        target, chip = TARGETS[topology], CHIPS["tpu", "v6e"]
        assert f"--target {target.name} " in container["args"][0]
        assert container["resources"]["limits"] == {"google.com/tpu": str(chip.chips_per_host)}
        assert container["resources"]["requests"] == container["resources"]["limits"]
    for service in (value for value in documents(name) if value["kind"] == "Service"):
        ports = [row["containerPort"] for row in container["ports"]]
        assert {row["targetPort"] for row in service["spec"]["ports"]} <= set(ports)
        assert service["spec"]["selector"]["app"] == "ling3"


def test_the_hosts_of_a_slice_are_those_of_the_target():
    (jobset,) = documents("jobset-v6e-4x4.yaml")
    runner = jobset["spec"]["replicatedJobs"][0]
    job = runner["template"]["spec"]
    assert job["completionMode"] == "Indexed"  # without it, pods have no index
    assert job["parallelism"] == job["completions"] == TARGETS["4x4"].processes == 4
    assert f"--shard $JOB/{runner['replicas']}" in container_of("jobset-v6e-4x4.yaml")["args"][0]
    leaders = documents("leaderworkerset-v6e-4x4.yaml")[0]["spec"]["leaderWorkerTemplate"]
    assert leaders["size"] == TARGETS["4x4"].processes
    shards = documents("job-shards.yaml")[0]["spec"]
    assert shards["parallelism"] == shards["completions"] == 64
    assert "--shard auto/64" in container_of("job-shards.yaml")["args"][0]
    for name in ("jobset-v6e-4x4.yaml", "leaderworkerset-v6e-4x4.yaml"):
        env = {row["name"]: row.get("valueFrom", {}) for row in container_of(name)["env"]}
        assert env["LING3_SECRET"]["secretKeyRef"] == {"name": "ling3", "key": "secret"}


def test_the_autoscaler_looks_at_a_metric_that_the_server_has():
    *_, scaler = documents("deployment-v6e-2x2.yaml")
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in (ROOT / "runners/serve/metrics.py").read_text()
    assert scaler["spec"]["scaleTargetRef"]["name"] == documents("deployment-v6e-2x2.yaml")[0]["metadata"]["name"]


RUNNER = """#!{python}
import os, signal, sys, time
if os.environ["DOES"] == "tell":
    print(*sys.argv[1:])
    print(*(os.environ.get(name) for name in ("NNODES", "NODE_RANK", "DIST_INIT_ADDR")))
elif os.environ["DOES"] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(7)))
    print("waits", flush=True)
    time.sleep(60)
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def variables(tmp_path):
    """Environment variables with a `ling3-runner` that does the action in DOES."""
    (tmp_path / "ling3-runner").write_text(RUNNER.format(python=sys.executable))
    (tmp_path / "ling3-runner").chmod(0o755)
    return environment({"PATH": f"{tmp_path}:{os.environ['PATH']}"})


def told(command: list[str], variables: dict[str, str]) -> list[str]:
    done = subprocess.run(command, env=variables | {"DOES": "tell"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", GIVEN)
def test_containers_run_commands_that_there_are(name, variables):
    container = container_of(name)
    arguments, place = told([*container["command"], *container["args"]], variables | GIVEN[name])
    said(main, *shlex.split(arguments), "--help")
    expected = {
        "jobset-v6e-4x4.yaml": "4 2 ling3-runner-5-0.ling3:8476",
        "leaderworkerset-v6e-4x4.yaml": "4 2 ling3-1.ling3.default:8476",
    }
    assert place == expected.get(name, "None None None")


def test_the_slurm_script_runs_a_command_that_there_is(variables):
    script = ROOT / "deploy/slurm-shards.sh"
    given = {"SLURM_ARRAY_TASK_ID": "3"}
    arguments, _ = told([str(script), "a.ling3", "in.jsonl", "out"], variables | given)
    assert arguments == "batch a.ling3 in.jsonl out/part-3.jsonl --shard auto"
    assert "#SBATCH --array=0-63" in script.read_text()


def script(name: str) -> list[str]:
    container = container_of(name)
    return [*container["command"], *container["args"]]


def test_the_first_process_of_a_container_ends_with_the_code_of_the_runner(variables):
    """Runs in a PID namespace, like a container: all its processes end with the first one."""
    assert len({container_of(name)["args"][0].split("runner=$!")[1] for name in GIVEN}) == 1
    alone = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    done = subprocess.run(
        [*alone, *script("job-shards.yaml")],
        env=variables | {"DOES": "crash"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 128 + signal.SIGKILL


def test_a_container_that_is_ended_ends_the_runner_and_waits_for_it(variables):
    with subprocess.Popen(
        script("job-shards.yaml"), env=variables | {"DOES": "wait"}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7
        assert time.monotonic() - began >= 0.3

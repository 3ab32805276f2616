"""What a cluster is asked for: options, and whether workers have room. No cluster is started."""

import re
from dataclasses import replace
from typing import Any

import pytest

from ling3export.foundation.errors import RequestError
from ling3export.runners.cli.main import main
from ling3export.runners.fleet.cluster import PLACE, SLICE, Cluster, ClusterError, worker_slices
from ling3export.runners.hosts.hosts import Hosts
from tests.support.refusals import refusal


def test_a_cluster_is_named_by_the_options():
    assert Cluster.parse("ray", 1, '{"TPU": 4}') == Cluster(None, 1, {"TPU": 4})
    assert Cluster.parse("ray://10.0.0.7:6379", 3, '{"CPU": 0.5}') == Cluster("10.0.0.7:6379", 3, {"CPU": 0.5})


@pytest.mark.parametrize(
    ("on", "resources", "message"),
    [
        ("dask", '{"CPU": 1}', "--on: expected ray or ray://HOST:PORT, found `dask`"),
        ("ray://", '{"CPU": 1}', "found `ray://`"),
        ("ray://head", '{"CPU": 1}', "found `ray://head`"),
        ("ray", "TPU=4", "--resources: expected an object with a number above 0 for each resource"),
        ("ray", "{}", "found `{}`"),
        ("ray", "[4]", "found `[4]`"),
        ("ray", '{"TPU": 0}', "found"),
        ("ray", '{"TPU": "4"}', "found"),
        ("ray", '{"TPU": true}', "found"),
        ("ray", '{"TPU": NaN}', "found"),
    ],
)
def test_other_options_are_refused_by_name(on, resources, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        Cluster.parse(on, 1, resources)


NODES = [
    {"Alive": True, "Resources": {"CPU": 8.0, "TPU": 4.0}},
    {"Alive": True, "Resources": {"CPU": 8.0, "TPU": 4.0}},
    {"Alive": True, "Resources": {"CPU": 64.0}},
    {"Alive": False, "Resources": {"CPU": 8.0, "TPU": 4.0}},
]


@pytest.mark.parametrize(
    ("replicas", "needs", "free", "message"),
    [
        (3, {"TPU": 4}, {}, "expected room for 3 workers of TPU 4, found room for 2: TPU 8 in all, on 3 nodes"),
        (1, {"TPU": 8}, {}, "found room for 0: TPU 8 in all, on 3 nodes"),
        (1, {"GPU": 1}, {}, "expected room for 1 workers of GPU 1, found room for 0: GPU 0 in all"),
        (2, {"TPU": 4}, {"TPU": 4}, "expected room for 2 workers of TPU 4, found TPU 4 free of 8"),
    ],
)
def test_too_little_room_is_said_at_once_and_by_name(replicas, needs, free, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        worker_slices(NODES, {"CPU": 80, "TPU": 8, **free}, Cluster(None, replicas, needs))


def test_room_that_is_there_is_taken():
    assert worker_slices(NODES, {"CPU": 80, "TPU": 8}, Cluster(None, 2, {"TPU": 4, "CPU": 2})) == [None, None]


def sliced(name: str, *places: int, **resources: float) -> list[dict[str, Any]]:
    """The nodes of a TPU slice."""
    return [{"Alive": True, "Resources": resources, "Labels": {SLICE: name, PLACE: str(place)}} for place in places]


FOUR = Hosts("127.0.0.1:1", 4, 0)


def test_hosts_of_a_worker_are_of_one_slice():
    """Half of one slice and half of another are room for two hosts twice, and for four nowhere."""
    four = Cluster(None, 1, {"TPU": 4}, Hosts("127.0.0.1:1", 4, 0))
    two = replace(four, replicas=2, hosts=Hosts("127.0.0.1:1", 2, 0))
    halves = [*sliced("a", 0, 1, TPU=4), *sliced("b", 0, 1, TPU=4)]
    whole = [*sliced("a", 0, 1, 2, 3, TPU=4), *sliced("b", 0, 1, 2, 3, TPU=4), *NODES]
    assert worker_slices(halves, {"TPU": 16}, two) == ["a", "b"]
    assert worker_slices(whole, {"TPU": 40}, replace(four, replicas=2)) == ["a", "b"]
    assert worker_slices(NODES, {"TPU": 8}, replace(two, replicas=1)) == [None]
    assert worker_slices(whole, {"TPU": 40}, replace(four, hosts=None)) == [None]  # one host may be of any slice
    for nodes, cluster, message in (
        (halves, four, "1 workers of 4 hosts with TPU 4 each, found room for 0: TPU 16 in all, on 4 nodes"),
        (whole, replace(four, replicas=2), "2 workers of 4 hosts with TPU 4 each, found TPU 28 free of 40"),
    ):
        with pytest.raises(ClusterError, match=re.escape(f"expected room for {message}")):
            worker_slices(nodes, {"TPU": 28}, cluster)


@pytest.mark.parametrize(
    ("words", "found"),
    [(["--coordinator", "a:1"], "--coordinator"), (["--host-id", "0"], "--host-id"), (["--trust-network"], "--trust")],
)
def test_a_command_on_a_cluster_is_given_once_and_not_on_each_host(tmp_path, words, found):
    command = ["batch", str(tmp_path), str(tmp_path / "in"), str(tmp_path / "out"), "--on", "ray", "--num-hosts", "2"]
    assert f"--on: expected --num-hosts alone to say what hosts a worker has, found {found}" in refusal(
        main, *command, *words
    )

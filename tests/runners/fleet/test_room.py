"""What a cluster is asked for: options, and whether workers have room. No cluster is started."""

import re

import pytest

from ling3export.errors import RequestError
from ling3export.runners.fleet.pool import Cluster, ClusterError, Pool, check_room


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
        check_room(NODES, {"CPU": 80, "TPU": 8, **free}, Cluster(None, replicas, needs))


def test_room_that_is_there_is_taken():
    assert check_room(NODES, {"CPU": 80, "TPU": 8}, Cluster(None, 2, {"TPU": 4, "CPU": 2})) is None


def test_a_cluster_that_is_not_there_is_said_at_once():
    pytest.importorskip("ray")
    with pytest.raises(ClusterError, match=r"ray: expected a cluster at 127\.0\.0\.1:9, found .*refused") as caught:
        Pool(Cluster("127.0.0.1:9", 1, {"CPU": 1}), dict, report=print)
    assert "ray start --head" in str(caught.value)

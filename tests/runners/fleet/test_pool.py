"""Workers that die, differ or fail, on a Ray of this process."""

import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from ling3export.foundation.errors import ArtifactError, Ling3Error
from ling3export.runners.cli.cluster import on_cluster
from ling3export.runners.fleet.crew import PLACE, SLICE, Cluster, ClusterError
from ling3export.runners.fleet.pool import WorkerLost, WorkerPool
from ling3export.runners.hosts.hosts import Hosts
from tests.support.fake_ray import Dead, FakeRay, RayError

HOSTS, BOUND = -3, -4


def released(hosts: Hosts) -> Any:
    """The address that host 0 holds; not any more."""
    if hosts.bound is None:
        return None
    with hosts.bound as bound:
        return bound.getsockname()


class Doubler:
    """Doubles numbers; ``does`` says what else happens at a number, and how often, and is told of HOSTS and BOUND."""

    def __init__(self, does: dict[int, list[Any]]) -> None:
        self.does = does

    def start(self, hosts: Hosts | None) -> dict[str, Any]:
        if hosts is not None:
            self.does.setdefault(HOSTS, []).append(hosts)
            self.does.setdefault(BOUND, []).append(released(hosts))
        if self.does.get(-1):
            raise self.does[-1].pop()
        return {
            "artifact": "a" * 64,
            "versions": {"jaxlib": "0.11.2" if not self.does.get(-2) else self.does[-2].pop()},
        }

    def work(self, piece: int) -> int:
        if self.does.get(piece):
            raise self.does[piece].pop()
        return 2 * piece


@pytest.fixture
def pool(monkeypatch):
    """Makes a pool whose workers do something at some numbers."""

    def made(
        does: dict[int, list[Any]],
        *,
        seed: int = 0,
        replicas: int = 2,
        at_once: int = 2,
        room: float = 4,
        hosts: int = 1,
        labels: Sequence[dict[str, str]] = ({},),
    ) -> WorkerPool:
        ray = FakeRay(seed, room)
        ray.labels = [*labels]
        monkeypatch.setitem(sys.modules, "ray", ray)
        several = Hosts("127.0.0.1:1", hosts, 0, 7.0) if hosts > 1 else None
        cluster = Cluster(None, replicas, {"CPU": 1}, several)
        said: list[str] = []
        found: Any = WorkerPool(cluster, lambda: Doubler(does), at_once=at_once, report=said.append)
        found.ray, found.said = ray, said
        return found

    return made


@pytest.mark.parametrize("seed", range(20))
def test_results_come_in_order_whoever_dies(pool, seed):
    """Every piece is done, none is there twice, and each dead worker has one other in its place."""
    dice = random.Random(seed)
    does = {dice.randrange(60): [dice.choice([Dead(), WorkerLost("worker: it is broken")])] for _ in range(6)}
    deaths = len(does)
    with pool(does, seed=seed, replicas=dice.choice([1, 3]), at_once=dice.choice([1, 2])) as workers:
        assert workers.about["versions"] == {"jaxlib": "0.11.2"}
        assert list(workers.map(range(60))) == [2 * n for n in range(60)]
        assert list(workers.map([])) == []
        assert workers.ray.started <= workers._cluster.replicas + deaths
        gone = [line for line in workers.said if "a worker is gone" in line]
    assert 1 <= len(gone) <= deaths
    assert workers.said[0].startswith("ray: ") and "http://10.0.0.1:8265" in workers.said[0]


SLICES = [{SLICE: name, PLACE: str(place)} for name in "ab" for place in range(3)]


def test_a_worker_of_several_hosts_is_ended_and_replaced_whole_when_one_of_them_ends(pool):
    """Each slice has one worker, whose host n is the slice's n-th; host 0 does the pieces."""
    does: dict[int, list[Any]] = {}

    def source(workers):
        for number in range(60):
            if number == 20:
                victim = workers.ray.following[0]
                workers.ray.results[victim] = RayError("the actor died")
            yield number

    with pool(does, hosts=3, room=1, labels=SLICES) as workers:
        assert workers.said == ["ray: 2 workers of 3 hosts, http://10.0.0.1:8265"]
        assert list(workers.map(source(workers))) == [2 * n for n in range(60)]
        ray = workers.ray
        assert (len(ray.groups), ray.removed, ray.started, ray.killed) == (3, 1, 9, 3)
    assert ray.removed == 3
    slices = [group["bundle_label_selector"] for group in ray.groups]
    assert {each[0][SLICE] for each in slices[:2]} == {"a", "b"}
    assert slices[2] == slices[0] or slices[2] == slices[1]
    assert all(each in (SLICES[:3], SLICES[3:]) for each in slices)
    assert {group["strategy"] for group in ray.groups} == {"STRICT_SPREAD"}
    assert [group["bundles"] for group in ray.groups] == [[{"CPU": 1}] * 3] * 3
    for first in range(0, 9, 3):
        hosts = does[HOSTS][first : first + 3]
        assert [(each.number, each.count, each.start_timeout) for each in hosts] == [(n, 3, 7.0) for n in range(3)]
        assert len({(each.coordinator, each.secret) for each in hosts}) == 1 and len(hosts[0].secret) > 16
        # Host 0 holds the port that the others were told, and nobody else does.
        assert does[BOUND][first : first + 3] == [hosts[0].address, None, None]


def test_hosts_of_a_worker_that_is_replaced_have_nodes_of_their_own_only_where_there_still_are_enough(pool):
    """A node that is gone for good: with the first worker's rule, the second one would wait for it for ever."""
    does: dict[int, list[Any]] = {}

    def source(workers):
        for number in range(20):
            if number == 5:
                workers.ray.labels.pop()
                workers.ray.results[workers.ray.following[0]] = RayError("the node died")
            yield number

    with pool(does, hosts=2, replicas=1, room=2, labels=({}, {})) as workers:
        assert list(workers.map(source(workers))) == [2 * n for n in range(20)]
        assert [group["strategy"] for group in workers.ray.groups] == ["STRICT_SPREAD", "SPREAD"]


def test_an_error_of_a_host_that_follows_is_the_runs(pool):
    """Its node lacks the artifact, for example. Host 0 would wait for it."""
    wrong = ArtifactError("artifact `x.ling3`: expected a manifest, found none")
    first = Hosts("127.0.0.1:1", 2, 0)
    does = {-1: [wrong]}

    class Second(Doubler):
        def start(self, hosts: Hosts | None) -> dict[str, Any]:
            assert hosts is not None
            return super().start(hosts) if hosts.number or not released(hosts) else {"artifact": "a"}

    pool({})  # a Ray of this process
    with (
        pytest.raises(ClusterError, match=r"ray: artifact `x.ling3`: expected a manifest, found none; on node"),
        WorkerPool(Cluster(None, 1, {"CPU": 1}, first), lambda: Second(does), report=print) as workers,
    ):
        list(workers.map(range(50)))


def test_pieces_are_taken_only_as_far_ahead_as_results_can_wait(pool):
    taken = []

    def source():
        for number in range(200):
            taken.append(number)
            yield number

    with pool({}) as workers:
        for count, _ in enumerate(workers.map(source())):
            assert len(taken) <= count + 4 * 2 * 2 + 1


def test_a_piece_that_kills_every_worker_ends_the_run(pool):
    message = "expected piece 3 done, found 3 dead workers: RayError"
    with (
        pool({3: [Dead() for _ in range(9)]}, at_once=1) as workers,
        pytest.raises(ClusterError, match=message) as caught,
    ):
        list(workers.map(range(9)))
    assert "the same command goes on from there" in str(caught.value)


def test_workers_that_die_as_they_start_end_the_run(pool):
    with pytest.raises(ClusterError, match="expected workers that live, found 7 dead ones"):
        pool({-1: [Dead() for _ in range(50)]})


def test_an_error_of_a_start_names_the_node(pool):
    wrong = ArtifactError("artifact `x.ling3`: expected a manifest, found none", "copy it there")
    with pytest.raises(
        ClusterError, match=r"ray: artifact `x.ling3`: expected a manifest, found none; on node .+"
    ) as caught:
        pool({-1: [wrong]}, replicas=1)
    assert caught.value.hint == "copy it there"


def test_an_error_of_a_piece_is_the_runs(pool):
    with pool({1: [Ling3Error("piece: expected another", "no")]}) as workers:
        with pytest.raises(Ling3Error, match="piece: expected another") as caught:
            list(workers.map(range(9)))
        assert caught.value.hint == "no"
    with pool({1: [ZeroDivisionError("by zero")]}) as workers, pytest.raises(ClusterError, match="worker: by zero"):
        list(workers.map(range(9)))


def test_nodes_with_another_jaxlib_are_refused(pool):
    alike = "expected nodes that are alike, found another versions, on "
    with pytest.raises(ClusterError, match=alike) as caught, pool({-2: ["0.12.0"]}) as workers:
        list(workers.map(range(100)))
    assert "the same artifact and the same versions" in str(caught.value)


def test_workers_that_never_start_are_not_waited_for_longer_than_said(pool, monkeypatch):
    monkeypatch.setattr("ling3export.runners.fleet.pool.check_room", lambda *_: None)
    with pytest.raises(ClusterError, match="expected a worker within 600 s, found none; free now: CPU 0"):
        pool({}, room=0)


def test_what_ray_prints_is_no_data_of_a_command(monkeypatch, capsys):
    """A node that died was told on stdout, in front of the completion line of `eval run`."""

    class Chatty(FakeRay):
        def wait(self, *arguments, **named):
            print("(raylet) a node has been marked dead")
            return super().wait(*arguments, **named)

    monkeypatch.setitem(sys.modules, "ray", Chatty())
    monkeypatch.setattr("ling3export.runners.cli.cluster.require", lambda *_: None)
    with on_cluster("batch", "ray", 1, '{"CPU": 1}', lambda: Doubler({})) as workers:
        assert list(workers.map([1, 2])) == [2, 4]
    print("data")
    out, err = capsys.readouterr()
    assert out == "data\n"
    assert err.count("(raylet)") == 3

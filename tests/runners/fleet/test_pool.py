"""Workers on a Ray cluster of this machine that end, differ or fail; each doubles numbers."""

import contextlib
import itertools
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ling3export.foundation.errors import ArtifactError, Ling3Error
from ling3export.runners.cli.cluster import on_cluster
from ling3export.runners.fleet.cluster import PLACE, SLICE, Cluster, ClusterError
from ling3export.runners.fleet.pool import WorkerLost, WorkerPool
from ling3export.runners.hosts.hosts import Hosts
from ling3export.runners.hosts.rendezvous import HostsError
from tests.support import ray_nodes

pytestmark = pytest.mark.extras

SLICES = [{SLICE: name, PLACE: str(place)} for name in "ab" for place in range(2)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[ray_nodes.Nodes]:
    """Two TPU slices of two hosts, by their labels, with room for one host of a worker on each node."""
    pytest.importorskip("ray")
    with ray_nodes.cluster() as nodes:
        for labels in SLICES:
            nodes.add(labels, engine=1)
        yield nodes


@dataclass
class Doubler:
    """Does what ``does`` says at a number; a thing that happens once leaves a file in ``folder``.

    Hosts of a worker are together while the sockets between them are open.
    """

    folder: Path
    does: dict[int, Any]

    def start(self, hosts: Hosts | None) -> dict[str, Any]:
        self._act(-1)
        if hosts is not None:
            (self.folder / f"host-{os.getpid()}").write_text(f"{hosts.number} {hosts.coordinator} {hosts.secret}")
        if hosts is not None and hosts.number == 0:
            assert hosts.bound is not None
            hosts.bound.listen()
            self._others = [hosts.bound.accept()[0] for _ in range(hosts.count - 1)]
        elif hosts is not None:
            self._follow(hosts)
        return {"artifact": "a" * 64, "pid": 0 if -2 not in self.does else os.getpid()}

    def work(self, piece: int) -> int:
        self._act(piece)
        return 2 * piece

    def _follow(self, hosts: Hosts) -> None:
        for _ in range(300):
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(hosts.address) as first:
                first.recv(1)
                raise HostsError("host 0: expected it to run, found that it ended")
            time.sleep(0.1)

    def _act(self, number: int) -> None:
        if number not in self.does:
            return
        thing, times = self.does[number]
        for time_ in range(times):
            try:
                (self.folder / f"{number}-{time_}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if isinstance(thing, Exception):
                raise thing
            os._exit(1)


@pytest.fixture
def pool(cluster: ray_nodes.Nodes, tmp_path: Path) -> Callable[..., Any]:
    """Makes a pool whose workers do something at some numbers, with what it reports."""

    @contextlib.contextmanager
    def made(does: dict[int, Any], *, replicas: int = 2, hosts: int = 1, **options: Any) -> Iterator[Any]:
        several = Hosts("127.0.0.1:1", hosts, 0, 30.0) if hosts > 1 else None
        asked, said = Cluster(cluster.address, replicas, {"engine": 1}, several), list[str]()
        with WorkerPool(asked, lambda: Doubler(tmp_path, does), report=said.append, **options) as workers:
            yield workers, said

    return made


DIES = None
EVER = 1000


def test_results_come_in_order_whoever_dies(pool: Callable[..., Any]) -> None:
    """Every piece is done, none is there twice; pieces are taken only as far ahead as results can wait."""
    dice, taken = random.Random(7), list[int]()
    does: dict[int, Any] = dict.fromkeys(dice.sample(range(60), 4), (DIES, 1))
    does[30] = (WorkerLost("worker: it is broken"), 1)

    def source() -> Iterator[int]:
        for number in range(60):
            taken.append(number)
            yield number

    with pool(does, replicas=3, at_once=2) as (workers, said):
        assert workers.about["artifact"] == "a" * 64
        for count, result in enumerate(workers.map(source())):
            assert result == 2 * count
            assert len(taken) <= count + 4 * 3 * 2 + 1
        assert count == 59
        assert list(workers.map([])) == []
        assert said[0].startswith("ray: 3 workers")
        assert 1 <= sum("a worker is gone" in line for line in said) <= 5 * 2  # pieces at a time


def test_a_worker_of_several_hosts_is_replaced_whole_when_one_of_them_ends(
    pool: Callable[..., Any], tmp_path: Path
) -> None:
    """Each slice has one worker; host 0 does the pieces, at an address that nobody else was told."""

    def groups(among: Callable[[int], bool] = lambda pid: True) -> dict[tuple[str, ...], dict[str, int]]:
        """The processes that were together, by host and by the address and the secret that they were told."""
        found: dict[tuple[str, ...], dict[str, int]] = {}
        for pid, (host, *told) in hosts(tmp_path).items():
            if among(pid):
                found.setdefault((*told,), {})[host] = pid
        return {told: each for told, each in found.items() if len(each) == 2}

    def source() -> Iterator[int]:
        """More pieces until the second worker is replaced; it is killed when the first one has been."""
        end, killed = time.monotonic() + 240, False
        for number in itertools.count():
            if number >= 20:
                time.sleep(0.05)
            if not killed and number >= 20 and len(groups()) >= 3 and (running := groups(runs)):
                os.kill(next(iter(running.values()))["1"], 9)
                killed = True
            if len(groups()) >= 4 or time.monotonic() > end:
                return
            yield number

    with pool({5: (DIES, 1)}, hosts=2) as (workers, said):
        assert said == ["ray: 2 workers of 2 hosts"]
        results = list(workers.map(source()))
        assert results == [2 * n for n in range(len(results))]
        assert len(said) >= 2
    assert len(groups()) >= 4, hosts(tmp_path)
    secrets = {secret for _, secret in groups()}
    assert len(secrets) == 2 and all(len(secret) > 16 for secret in secrets)


def runs(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and command.read_bytes() != b""


def hosts(folder: Path) -> dict[int, list[str]]:
    """Number, address and secret of each process that was a host."""
    return {int(path.name.partition("-")[2]): path.read_text().split() for path in folder.glob("host-*")}


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ({3: (DIES, EVER)}, "ray: expected piece 3 done, found 3 dead workers: "),
        ({-1: (DIES, EVER)}, "ray: expected a worker that lives, found one that ended 16 times: "),
        ({-2: (DIES, 0)}, "ray: expected nodes that are alike, found another pid, on "),
        (
            {-1: (ArtifactError("artifact `x`: expected one", "copy it"), EVER)},
            "ray: artifact `x`: expected one; on node ",
        ),
        ({1: (Ling3Error("piece: expected another"), 1)}, "piece: expected another"),
        ({1: (ZeroDivisionError("by zero"), 1)}, "ray: worker: by zero"),
    ],
)
def test_what_ends_a_run_is_said(pool: Callable[..., Any], does: dict[int, Any], message: str) -> None:
    with pytest.raises(Ling3Error) as caught, pool(does) as (workers, _):
        list(workers.map(range(9)))
    assert caught.value.message.startswith(message)
    assert not message.startswith("ray: artifact") or caught.value.hint == "copy it"


def test_an_error_of_a_host_that_follows_is_the_runs_at_once(pool: Callable[..., Any]) -> None:
    """Its node lacks the artifact, for example. Host 0 would wait for it."""
    with pytest.raises(ClusterError, match="ray: artifact `x`: expected one; on node "):
        pool({-1: (ArtifactError("artifact `x`: expected one"), 1)}, replicas=1, hosts=2).__enter__()


def test_what_ray_prints_is_no_data_of_a_command(cluster: ray_nodes.Nodes, tmp_path: Path, capsys: Any) -> None:
    """A node that died was told on stdout, in front of the completion line of `eval run`."""
    where = Cluster(cluster.address, 1, {"engine": 1})
    with on_cluster("batch", where, lambda: Doubler(tmp_path, {})) as workers:
        print("(raylet) a node has been marked dead")
        assert list(workers.map([1, 2])) == [2, 4]
    print("data")
    out, err = capsys.readouterr()
    assert out == "data\n"
    assert "(raylet)" in err


def test_a_cluster_that_is_not_there_is_said_at_once() -> None:
    pytest.importorskip("ray")
    with pytest.raises(ClusterError, match=r"ray: expected a cluster at 127\.0\.0\.1:9, found .*refused") as caught:
        WorkerPool(Cluster("127.0.0.1:9", 1, {"CPU": 1}), dict, report=print)
    assert "ray start --head" in str(caught.value)

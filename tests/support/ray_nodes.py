"""A Ray cluster in this machine. Run as a program: prints its address; a line of JSON on stdin adds or kills a node."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

TRIES = 5
SMALL = {"num_cpus": 1, "object_store_memory": 80 << 20}


class Nodes:
    """The cluster that a child process has.

    Attributes:
        address: HOST:PORT of its head.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._said()

    def add(self, labels: Mapping[str, str] | None = None, **resources: float) -> None:
        """Adds a node, and waits until the cluster knows it."""
        self._tell({"add": resources, "labels": dict(labels or {})})

    def kill(self) -> None:
        """Ends the node that was added last, with all that runs there."""
        self._tell({"kill": 1})

    def _tell(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        assert self._said() == "done"

    def _said(self) -> str:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith("> "):
            assert line, "the cluster has ended"
        return line[2:].strip()


@contextmanager
def cluster() -> Iterator[Nodes]:
    """A cluster whose head has no resources of ours."""
    pipe, equals = subprocess.PIPE, {"RAY_worker_niceness": "0"}  # with 15, the default, workers starve beside others
    with subprocess.Popen(
        [sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, env=os.environ | equals
    ) as process:
        try:
            yield Nodes(process)
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


def patient(start: Callable[[], Any]) -> Any:
    """What ``start`` starts. Ray gives a node 30 s, which a busy machine exceeds: then it is tried again."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(Exception):
            return start()
    return start()


def main() -> None:
    """Obeys until stdin ends."""
    from ray.cluster_utils import Cluster

    nodes = patient(lambda: Cluster(initialize_head=True, head_node_args=SMALL | {"include_dashboard": False}))
    print(">", nodes.address, flush=True)
    added = []
    for line in sys.stdin:
        order = json.loads(line)
        if "add" in order:
            added.append(patient(partial(nodes.add_node, **SMALL, resources=order["add"], labels=order["labels"])))
        else:
            nodes.remove_node(added.pop(), allow_graceful=False)
        print("> done", flush=True)
    nodes.shutdown()


if __name__ == "__main__":
    main()

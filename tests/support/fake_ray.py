"""What ``WorkerPool`` uses of Ray, in this process: calls run at once, and end in a random order."""

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Dead(BaseException):
    """Ends the process of a worker."""


class Ref(int):
    """The number of a call; as an argument of another one it stands for its result."""


RUNS = object()  # the result of a call that has not ended


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """What WorkerPool uses of Ray.

    Attributes:
        started: How many actors were.
        killed: How many were ended.
        groups: Arguments of each placement group.
        removed: How many of those were.
        following: Calls of hosts that follow another one, which do not end by themselves.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, seed: int = 0, room: float = 4) -> None:
        self.random, self.room = random.Random(seed), room
        self.results: dict[int, Any] = {}
        self.numbers = itertools.count()
        self.started = self.killed = self.removed = 0
        self.labels: list[dict[str, str]] = [{}]  # of each node
        self.groups: list[dict[str, Any]] = []
        self.following: list[Ref] = []
        placed = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, number: (group, number))
        self.util = SimpleNamespace(
            placement_group=self.group,
            remove_placement_group=self.remove,
            get_node_ip_address=lambda: "127.0.0.1",
            scheduling_strategies=placed,
        )

    def group(self, bundles: list[dict[str, float]], **options: Any) -> int:
        self.groups.append({"bundles": bundles, **options})
        return len(self.groups) - 1

    def remove(self, group: int) -> None:
        self.removed += 1

    def init(self, **_: object) -> Any:
        return SimpleNamespace(dashboard_url="10.0.0.1:8265")

    def shutdown(self) -> None:
        pass

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": self.room}, "Labels": labels} for labels in self.labels]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": self.room * len(self.labels)}

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda make: self.actor(cls(make))))

    def actor(self, worker: Any) -> Any:
        actor = SimpleNamespace(dead=False)
        self.started += 1

        def call(method: Callable[..., Any]) -> Any:
            def remote(*arguments: Any) -> Ref:
                number = Ref(next(self.numbers))
                try:
                    if actor.dead:
                        raise Dead
                    given = [self.results[each] if isinstance(each, Ref) else each for each in arguments]
                    self.results[number] = method(*given)
                    if any(getattr(each, "number", 0) for each in given):
                        self.results[number] = RUNS
                        self.following.append(number)
                except Dead:
                    actor.dead = True
                    self.results[number] = RayError("the actor died")
                except Exception as error:
                    self.results[number] = RayTaskError(error)
                return number

            return SimpleNamespace(remote=remote)

        actor.listens, actor.start, actor.work = call(worker.listens), call(worker.start), call(worker.work)
        return actor

    def wait(self, references: list[int], *, num_returns: int, timeout: float | None) -> tuple[list[int], list[int]]:
        if self.room == 0:  # nothing starts
            return [], references
        return [self.random.choice([each for each in references if self.results[each] is not RUNS])], []

    def get(self, reference: int) -> Any:
        result = self.results.pop(reference)
        if isinstance(result, RayError):
            raise result
        return result

    def kill(self, actor: Any) -> None:
        self.killed += 1

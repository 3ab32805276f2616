"""What ``Pool`` uses of Ray, in this process: calls run at once, and end in a random order."""

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Dead(BaseException):
    """Ends the process of a worker."""


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause: BaseException) -> None:
        super().__init__(str(cause))
        self.cause = cause


class FakeRay:
    """What Pool uses of Ray.

    Attributes:
        started: How many workers were.
        killed: How many were ended.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, seed: int = 0, room: float = 4) -> None:
        self.random, self.room = random.Random(seed), room
        self.results: dict[int, Any] = {}
        self.numbers = itertools.count()
        self.started = self.killed = 0

    def init(self, **_: object) -> Any:
        return SimpleNamespace(dashboard_url="10.0.0.1:8265")

    def shutdown(self) -> None:
        pass

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": self.room}}]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": self.room}

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda make: self.actor(cls(make))))

    def actor(self, worker: Any) -> Any:
        actor = SimpleNamespace(dead=False)
        self.started += 1

        def call(method: Callable[..., Any]) -> Any:
            def remote(*arguments: Any) -> int:
                number = next(self.numbers)
                try:
                    if actor.dead:
                        raise Dead
                    self.results[number] = method(*arguments)
                except Dead:
                    actor.dead = True
                    self.results[number] = RayError("the actor died")
                except Exception as error:
                    self.results[number] = RayTaskError(error)
                return number

            return SimpleNamespace(remote=remote)

        actor.start, actor.work = call(worker.start), call(worker.work)
        return actor

    def wait(self, references: list[int], *, num_returns: int, timeout: float | None) -> tuple[list[int], list[int]]:
        if self.room == 0:  # nothing starts
            return [], references
        return [self.random.choice(references)], []

    def get(self, reference: int) -> Any:
        result = self.results.pop(reference)
        if isinstance(result, RayError):
            raise result
        return result

    def kill(self, actor: Any) -> None:
        self.killed += 1

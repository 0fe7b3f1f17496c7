"""Replicas without Ray: scripted ones that do what they are told."""

from collections.abc import AsyncGenerator

from aserve.core.errors import UnavailableError
from aserve.ray.carried import Head, Item, Tail, Whole
from aserve.ray.engine_replica import Health
from aserve.ray.replicas import ReplicaLost, Target

SSE = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"its own"))
JSON = ((b"content-type", b"application/json"),)
GONE = object()
"""In a script: the replica goes away here."""
METRICS = '# HELP a Of a.\n# TYPE a gauge\na 1.0\n# HELP b Of b.\nb{{x="{}"}} 2.0\n'


class FakeReplicas:
    """Each replica answers by its script: items, and GONE. asked: who was, with what, in order."""

    def __init__(self, **scripts) -> None:
        self.scripts = scripts
        self.asked: list[tuple[str, object, Target]] = []
        self.carried: list[object] = []
        self.wholes: dict[str, Whole] = {}
        self.states = dict.fromkeys(scripts, "ready")

    async def respond(self, carried, ask, target) -> AsyncGenerator[Item]:
        name = target.only or next(iter([each for each in self.scripts if each not in target.avoid] or self.scripts))
        self.asked.append((name, ask, target))
        self.carried.append(carried)
        script = self.scripts.get(name)
        if script is None:
            raise UnavailableError("no such replica")
        for item in script:
            if item is GONE:
                raise ReplicaLost(name)
            yield item

    async def of_all(self, method, *arguments):
        if method == "health":
            return [
                Health(replica=name, state=state, num_open=1, pid=1, model_names=("demo",))
                for name, state in self.states.items()
            ]
        if method == "metrics":
            return [(name, METRICS.format(name)) for name in self.scripts]
        return list(self.wholes.values())


def stream(name: str, *pieces: bytes) -> list[Item]:
    return [Head(200, SSE, name), *pieces, Tail()]


def refusal(name: str, status: int = 429) -> list[Item]:
    headers = (*JSON, (b"retry-after", b"7"))
    return [Head(status, headers, name), b'{"error":{"code":"engine_overloaded"}}', Tail()]

"""A world with too little memory: sequences are preempted and swapped out, and cached blocks live on in the host."""

from collections.abc import Mapping
from typing import Any

from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.scheduler import Scheduler
from tests.faults.world import TEXT, World

GREEDY = {"max_tokens": 30, "temperature": 0}
ASKED: Mapping[str, tuple[str, dict[str, Any]]] = {
    **{f"long {letter}": (TEXT, GREEDY | {"prompt": letter * 20}) for letter in "abcd"},
    "stream": (TEXT, GREEDY | {"prompt": "stream" * 3, "stream": True}),
    "two choices": (TEXT, GREEDY | {"prompt": "two" * 6, "n": 2, "temperature": 1, "seed": 1}),
    "same again": (TEXT, GREEDY | {"prompt": "a" * 20, "max_tokens": 3}),
    "plain": (TEXT, GREEDY | {"prompt": "plain", "max_tokens": 6}),
}


class SmallWorld(World):
    """With half of the blocks that its clients would like to have, and room in host memory."""

    asked = ASKED

    def new_scheduler(self, **more: Any) -> Scheduler:
        """Whoever is preempted is swapped out."""
        host = {"num_host_blocks": 30, "keeps_evicted": True, "preemption": PreemptionRule("swap")}
        return super().new_scheduler(num_blocks=24, **host, **more)

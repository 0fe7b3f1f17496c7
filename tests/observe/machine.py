"""What both laws' machines are made of: one of the scheduler's, with one step ahead or three."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from aserve.core.request import Request
from tests.scheduler.test_state_machine import LIMITS, REQUESTS, SchedulerMachine


class SeenMachine(SchedulerMachine):
    """All that may happen to a scheduler happens, and somebody looks on."""

    @initialize(depth=st.sampled_from([2, 4]), limits=LIMITS, requests=st.lists(REQUESTS, min_size=1, max_size=5))
    def boot(self, depth: int, limits: dict[str, object], requests: list[Request]):
        self.depth = depth
        super().boot(limits, requests)

"""Any order of calls keeps every invariant, and gives every request the tokens that it gets alone.

The pools are tiny and the alphabet has three letters, so that prefixes collide, memory runs out and sequences are
preempted all the time.
"""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from aserve.core.errors import ContextLengthError
from aserve.core.ids import RequestId
from aserve.core.request import Request
from aserve.scheduler.scheduler import MAX_IN_FLIGHT
from tests.scheduler.sync_loop import EOS, LETTERS, SyncLoop, request

pytestmark = pytest.mark.slow

PROMPTS = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=12).map(tuple)
REQUESTS = st.builds(
    request,
    name=st.just("nameless"),
    prompt=PROMPTS,
    max_tokens=st.integers(1, 8),
    salt=st.integers(0, 1),
    stop_ids=st.sampled_from([frozenset(), frozenset({EOS}), frozenset({1, EOS})]),
    min_tokens=st.integers(0, 3),
)
LIMITS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4]),
        "num_blocks": st.integers(2, 12),
        "max_num_batched_tokens": st.integers(1, 16),
        "max_num_seqs": st.integers(1, 5),
        "max_model_len": st.sampled_from([1000, 16, 6]),
        "watermark": st.sampled_from([0.0, 0.3]),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
    }
)
ANY = st.integers(0, 9)


class SchedulerMachine(RuleBasedStateMachine):
    """No rule has a precondition: one that finds nothing to do does nothing, so that examples shrink well."""

    depth = MAX_IN_FLIGHT

    @initialize(limits=LIMITS, requests=st.lists(REQUESTS, min_size=1, max_size=5))
    def boot(self, limits: dict[str, float], requests: list[Request]):
        self.loop = SyncLoop(depth=self.depth, **limits)
        for wanted in requests:
            self.add_or_be_refused(wanted, 0)

    @rule(wanted=REQUESTS, lateness_s=st.integers(0, 2))
    def add(self, wanted: Request, lateness_s: int):
        self.add_or_be_refused(wanted, lateness_s)

    @rule(index=ANY)
    def cancel(self, index: int):
        self.loop.cancel(f"r{index}")  # waiting, running, in flight, ended or unknown

    @rule(index=ANY)
    def finish(self, index: int):
        self.loop.finish(f"r{index}")

    @rule()
    def plan(self):
        if len(self.loop.in_flight) < self.depth:
            self.loop.plan()

    @rule()
    def commit(self):
        if self.loop.in_flight:
            self.loop.commit()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int):
        for _ in range(count):
            self.loop.step()

    @rule(index=st.integers(0, 1))
    def fail(self, index: int):
        if index < len(self.loop.in_flight):
            self.loop.fail(index)

    @rule()
    def drain(self):
        self.loop.drain()

    def teardown(self):
        self.loop.drain()
        self.loop.compare()

    def add_or_be_refused(self, wanted: Request, lateness_s: int):
        loop = self.loop
        count = len(loop.answers)
        # Who came earlier may have been tokenized later, and is added behind those who came after him.
        wanted = msgspec.structs.replace(wanted, id=RequestId(f"r{count}"), arrival_s=float(count - lateness_s))
        if len(wanted.prompt_token_ids) < loop.context_len:
            loop.add(wanted)
        else:
            with pytest.raises(ContextLengthError, match=str(len(wanted.prompt_token_ids))):
                loop.scheduler.add(wanted)


class StepByStepMachine(SchedulerMachine):
    """The slow twin of the overlapped loop: every step lands before the next is planned."""

    depth = 1


# Most examples are a few calls long; hence more of them than of other properties, whatever the profile.
MACHINE_SETTINGS = settings(max_examples=3 * settings.default.max_examples)

TestOneStepAhead = SchedulerMachine.TestCase
TestOneStepAhead.settings = MACHINE_SETTINGS
TestStepByStep = StepByStepMachine.TestCase
TestStepByStep.settings = MACHINE_SETTINGS

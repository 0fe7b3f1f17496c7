"""Any order of calls keeps every invariant, and gives every request the tokens that it gets alone.

The pools are tiny and the alphabet has three letters, so that prefixes collide, memory runs out and sequences are
preempted all the time.
"""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from aserve.core.errors import InvalidRequestError, OverloadedError
from aserve.core.ids import RequestId
from aserve.core.params import BeamParams
from aserve.core.request import Request
from aserve.scheduler.preemption import PreemptionRule
from aserve.scheduler.queue import first_come_first_served, priority_with_ageing
from tests.scheduler.sync_loop import EOS, LETTERS, SEEDS_OF_A_SALT, SyncLoop, request, two_of_three
from tests.scheduler.traces import GRAPH_SIZES

pytestmark = pytest.mark.slow

PROMPTS = st.lists(st.sampled_from(LETTERS), min_size=1, max_size=12).map(tuple)
SAMPLED = {"temperature": 1.0}
KINDS = st.sampled_from(
    [
        {},
        {},
        {},
        SAMPLED | {"n": 2},
        {"allowed_after": two_of_three},
        SAMPLED | {"n": 3, "best_of": 4, "allowed_after": two_of_three},
        SAMPLED | {"n": 4},
        SAMPLED | {"n": 1, "best_of": 3},
        SAMPLED | {"logprobs": 1, "prompt_logprobs": 0},
        {"beam": BeamParams(width=2), "n": 2},
        {"beam": BeamParams(width=2, length_penalty=2.0, early_stopping="never")},
        {"beam": BeamParams(width=1, early_stopping=True)},
    ]
)


def request_of_kind(kind: dict[str, object], **fields: object) -> Request:
    return request(**fields, **kind)


REQUESTS = st.builds(
    request_of_kind,
    kind=KINDS,
    name=st.just("nameless"),
    prompt=PROMPTS,
    max_tokens=st.integers(1, 8),
    salt=st.integers(0, 1),
    stop_ids=st.sampled_from([frozenset(), frozenset({EOS}), frozenset({1, EOS})]),
    min_tokens=st.integers(0, 3),
    priority=st.integers(0, 2),
    tenant=st.sampled_from("ab"),
    weight=st.sampled_from([1.0, 3.0]),
    deadline_s=st.sampled_from([None, None, 3.0]),
    seed=st.integers(1, 9),
)
LIMITS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4]),
        "num_blocks": st.integers(2, 12) | st.sampled_from([18, 30]),
        "max_num_batched_tokens": st.integers(1, 16),
        "max_num_seqs": st.integers(1, 5),
        "max_model_len": st.sampled_from([1000, 16, 6]),
        "watermark": st.sampled_from([0.0, 0.3]),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "num_host_blocks": st.sampled_from([0, 2, 16]),
        "preemption": st.sampled_from([PreemptionRule("swap"), PreemptionRule(swap_cost_s=1e-5)]),
        "policy": st.sampled_from([first_come_first_served, priority_with_ageing(2.0)]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 2]),
        "scheduler_delay_factor": st.sampled_from([0.0, 1.0]),
        "keeps_evicted": st.booleans(),
        "is_fair": st.booleans(),
        "target_itl_s": st.sampled_from([0.0, None, 0.001, 0.014]),
        "graph_sizes": st.sampled_from([None, GRAPH_SIZES]),
        "plans_behind_prompts": st.sampled_from([True, True, False]),
        "windows": st.sampled_from([(None,), (None,), (3,), (None, 3), (5, None, 1, 5)]),
    }
)
ANY = st.integers(0, 9)


class SchedulerMachine(RuleBasedStateMachine):
    """No rule has a precondition: one that finds nothing to do does nothing, so that examples shrink well."""

    depth = 2
    new_loop: type[SyncLoop] = SyncLoop

    @initialize(limits=LIMITS, requests=st.lists(REQUESTS, min_size=1, max_size=5))
    def boot(self, limits: dict[str, object], requests: list[Request]):
        self.loop = self.new_loop(depth=self.depth, **limits)
        for wanted in requests:
            self.add_or_be_refused(wanted, 0)

    @rule(wanted=REQUESTS, lateness_s=st.integers(0, 2))
    def add(self, wanted: Request, lateness_s: int):
        self.add_or_be_refused(wanted, lateness_s)

    @rule(index=ANY)
    def cancel(self, index: int):
        self.loop.cancel(f"r{index}")  # waiting, running, in flight, ended or unknown

    @rule(index=ANY, choice=st.integers(0, 1))
    def finish(self, index: int, choice: int):
        self.loop.finish(f"r{index}", choice)

    @rule(index=ANY, choice=st.integers(0, 1), seeds=st.lists(st.integers(1, 9), min_size=1, max_size=2))
    def fork(self, index: int, choice: int, seeds: list[int]):
        answer = self.loop.answers.get(f"r{index}")
        salt = answer.request.seed // SEEDS_OF_A_SALT if answer is not None else 0
        count = len(self.loop.answers)
        branches = [
            request(
                *(f"r{count + k}", (), 3),
                salt=salt,
                seed=seed,
                arrival_s=float(count),
                allowed_after=two_of_three if seed % 2 else None,
                **SAMPLED,
            )
            for k, seed in enumerate(seeds)
        ]
        with suppress(InvalidRequestError):  # unknown, cancelled, held back, or at its full length
            self.loop.fork(f"r{index}", choice, branches)

    @rule(seconds=st.integers(0, 2))
    def wait(self, seconds: int):
        self.loop.now += seconds

    @rule()
    def reset_prefix_cache(self):
        self.loop.scheduler.reset_prefix_cache()

    @rule()
    def plan(self):
        if self.loop.may_plan:
            self.loop.plan()

    @rule()
    def commit(self):
        if self.loop.in_flight:
            self.loop.commit()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int):
        for _ in range(count):
            self.loop.step()

    @rule(index=st.integers(0, 3), out_of_memory=st.booleans())
    def fail(self, index: int, out_of_memory: bool):
        if index < len(self.loop.in_flight):
            self.loop.fail(index, out_of_memory=out_of_memory)

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
        deadline_s = None if wanted.deadline_s is None else loop.now + wanted.deadline_s
        wanted = msgspec.structs.replace(
            wanted, id=RequestId(f"r{count}"), arrival_s=float(count - lateness_s), deadline_s=deadline_s
        )
        try:
            context_len = loop.scheduler._admission.context_len_for(wanted)
        except InvalidRequestError as refused:  # I17: too long, or too wide
            with pytest.raises(type(refused)):
                loop.scheduler.add(wanted)
        else:
            assert len(wanted.prompt_token_ids) < context_len
            with suppress(OverloadedError):  # its time would not do
                loop.add(wanted)


class StepByStepMachine(SchedulerMachine):
    """The slow twin of the overlapped loop: every step lands before the next is planned."""

    depth = 1


class ThreeAheadMachine(SchedulerMachine):
    """A small model's: three steps wait behind the one that runs."""

    depth = 4


TestOneStepAhead = SchedulerMachine.TestCase
TestStepByStep = StepByStepMachine.TestCase
TestThreeStepsAhead = ThreeAheadMachine.TestCase

"""Explanations of requests at a scheduler: phases, the queue, chunks, preemptions, and why no more was cached."""

import msgspec
import pytest

from aserve.core.explanation import Difference
from aserve.core.params import BeamParams
from aserve.kv_cache.evictions import Evictions
from aserve.observe import explainer, lives
from aserve.scheduler.preemption import PreemptionRule
from tests.counting import lines_run
from tests.observe.explained import FLIGHT_S, ExplainedLoop, micro
from tests.scheduler.sync_loop import request

LONG = (0, 1, 2, 0, 1, 1, 2)
"""Three whole blocks of two, and the last token."""


def prefix(found, index=0):
    return found.choices[index].prefix


def test_phases_of_a_request_alone():
    loop = ExplainedLoop()
    [found] = loop.explained(request("a", LONG, 3))
    assert (found.id, found.model, found.state, found.explained) == ("a", "model", "ended", True)
    assert (found.prompt_tokens, found.choices[0].tokens) == (7, 3)
    phases = found.phases_ms
    assert {name for name, one in phases.items() if one} == {"prepare", "queued", "prefill", "decode", "publish"}
    assert phases["prepare"] == 0.1
    assert [hold.reason for hold in found.queue.holds] == ["step"]
    assert found.steps.num == 3
    assert found.steps.share_ms == found.steps.total_ms
    assert [(one.start, one.tokens, one.again) for one in found.choices[0].chunks] == [(0, 7, False)]


def test_what_was_spent_before_is_preparation():
    loop = ExplainedLoop()
    [found] = loop.explained(msgspec.structs.replace(request("a", LONG), spent_s=0.25, name="its name"))
    assert found.phases_ms["prepare"] == 250.1
    assert found.name == "its name"


def test_shares_of_all_sum_to_the_steps():
    loop = ExplainedLoop(num_blocks=40)
    explained = loop.explained(*(request(f"r{i}", LONG[: 2 + i], 4) for i in range(4)))
    whole = {plan.step_id for plan in loop.plans}
    assert max(found.steps.num for found in explained) <= len(whole)
    total_ms = 1000 * loop._last_landed_s
    assert sum(found.steps.share_ms for found in explained) <= total_ms
    assert sum(found.steps.share_ms for found in explained) == pytest.approx(
        max(found.steps.total_ms for found in explained), rel=0.01
    )


def test_a_long_prompt_is_told_by_its_chunks():
    loop = ExplainedLoop(num_blocks=40, max_num_batched_tokens=4, long_prefill_token_threshold=3, depth=1)
    [found] = loop.explained(request("a", LONG, 2))
    chunks = found.choices[0].chunks
    assert [(one.start, one.tokens) for one in chunks] == [(0, 3), (3, 3), (6, 1)]
    assert [one.step for one in chunks] == [0, 1, 2]
    assert {one.ms for one in chunks} == {1000 * FLIGHT_S + 1}
    assert micro(found.phases_ms["prefill"]) > 3 * micro(1000 * FLIGHT_S)


def test_who_waits_is_told_behind_whom_and_why():
    loop = ExplainedLoop(num_blocks=40, max_num_seqs=1, depth=1)
    first, second, third = (request(name, LONG, 4, arrival_s=0.0) for name in "abc")
    loop.add(first)
    loop.step()
    loop.add(second)
    loop.add(third)
    loop.step()
    waits = loop.explanation("c")
    assert waits.state == "waiting"
    assert (waits.queue.waiting, waits.queue.ahead, waits.queue.running) == (1, 1, 1)
    loop.drain()
    found = loop.explanation("c")
    holds = {hold.reason: hold for hold in found.queue.holds}
    assert set(holds) == {"step", "rows"}
    assert holds["rows"].plans > 4
    assert found.phases_ms["queued"] > loop.explanation("b").phases_ms["queued"]


@pytest.mark.parametrize("options", [{}, {"is_fair": True}], ids=["one queue", "turns"])
def test_who_comes_looks_at_itself_and_not_at_all_who_wait(options):
    """Catches a thousand branches of a request that all ask where their time goes, and come in seconds of a stall."""
    wanted = [request(f"r{num}", LONG, 4) for num in range(60)]
    loop = ExplainedLoop(num_blocks=40, max_num_seqs=1, plain=[one.id for one in wanted], **options)
    num_lines = []
    for one in wanted:
        loop.add(one)
        num_lines.append(lines_run(lambda one=one: loop.observer.explain(one)))
    assert [loop.explanation(wanted[num].id).queue.ahead for num in (0, 1, 59)] == [0, 1, 59]
    assert num_lines[59] == num_lines[5]


def test_of_a_tenant_that_takes_turns_its_own_are_told_those_that_have_begun_included():
    loop = ExplainedLoop(num_blocks=40, max_num_seqs=1, is_fair=True)
    for name, tenant in (("a", "one"), ("b", "one"), ("c", "two"), ("d", "one")):
        loop.add(request(name, LONG, 4, n=2, tenant=tenant))
        if name == "a":
            loop.step()
    assert [loop.explanation(name).queue.ahead for name in "abcd"] == [0, 1, 0, 3]


def test_a_request_that_never_ran_was_queued():
    loop = ExplainedLoop(num_blocks=40, max_num_seqs=1)
    loop.add(request("a", LONG, 9))
    loop.step()
    loop.add(request("b", LONG))
    loop.step()
    loop.cancel("b")
    found = loop.explanation("b")
    assert found.state == "ended"
    assert {name for name, one in found.phases_ms.items() if one} == {"prepare", "queued"}
    assert (found.steps.num, found.choices[0].prefix) == (0, None)


def test_a_request_whose_reader_is_gone_while_it_runs_has_ended():
    loop = ExplainedLoop()
    loop.add(request("a", LONG, 9))
    loop.step()
    loop.leave("a")
    assert loop.explanation("a").state == "ended"


def preempting(mode, **options):
    """Two that do not fit together: the second gives way."""
    limits = {"num_blocks": 9, "num_host_blocks": 16, "preemption": PreemptionRule(mode), "watermark": 0.0}
    loop = ExplainedLoop(**limits, **options)
    return loop, loop.explained(request("a", (0, 1, 2), 10), request("b", (1, 0, 2), 10, arrival_s=0.00001))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preemption_by_swap(depth):
    loop, (first, second) = preempting("swap", depth=depth)
    assert first.choices[0].num_preemptions == 0
    course = second.choices[0]
    assert course.num_preemptions == loop.scheduler.statistics().num_preemptions
    loss = course.preemptions[0]
    assert (loss.kind, loss.because) == ("swap", "memory")
    assert 0 < loss.blocks_in <= loss.blocks_out == -(-loss.computed_tokens // 2)
    moved = [plan.block_ops for plan in loop.plans if plan.block_ops is not None]
    assert sum(one.blocks_out for one in course.preemptions) == sum(len(ops.swap_outs) for ops in moved)
    assert sum(one.blocks_in for one in course.preemptions) == sum(len(ops.swap_ins) for ops in moved)
    assert loss.recomputed_tokens == 0
    assert loss.waited_ms > 0
    assert micro(second.phases_ms["preempted"]) == sum(micro(one.waited_ms) for one in course.preemptions)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preemption_by_recomputation(depth):
    loop, (_, second) = preempting("recompute", depth=depth)
    course = second.choices[0]
    assert course.num_preemptions == loop.scheduler.statistics().num_preemptions > 0
    loss = course.preemptions[0]
    assert (loss.kind, loss.blocks_out, loss.blocks_in) == ("recompute", 0, 0)
    assert 0 < loss.recomputed_tokens <= loss.computed_tokens
    assert loss.recompute_ms > 0
    assert any(one.again for one in course.chunks)
    assert micro(second.phases_ms["preempted"]) == sum(micro(one.waited_ms) for one in course.preemptions)
    assert micro(second.phases_ms["recompute"]) == sum(micro(one.recompute_ms) for one in course.preemptions)


def test_a_step_that_failed_is_told():
    loop = ExplainedLoop(num_blocks=40)
    loop.add(request("a", LONG))
    loop.add(request("b", LONG[:3]))
    loop.plan()
    loop.fail()
    loop.drain()
    for name in "ab":
        found = loop.explanation(name)
        assert found.steps.failed == 1
        assert {loss.because for loss in found.choices[0].preemptions} <= {"failed_step"}


def test_a_prompt_that_goes_on_behind_a_failed_step_is_no_answer_yet():
    """Caught: what is left of the prompt, once the failed step's tokens are computed again, told as decoding."""
    loop = ExplainedLoop(num_blocks=40, max_num_batched_tokens=4, long_prefill_token_threshold=3, depth=1)
    loop.add(request("a", LONG, 1))
    loop.add(request("b", LONG[:3], 1))
    loop.plan()
    loop.fail()
    loop.drain()
    found = loop.explanation("a")
    assert found.choices[0].preemptions[0].computed_tokens == 3
    assert found.phases_ms["recompute"] > 0
    assert found.phases_ms["prefill"] > 2 * 1000 * FLIGHT_S
    assert found.phases_ms["decode"] == 0


def test_choices_are_told_each():
    loop = ExplainedLoop(num_blocks=40)
    [found] = loop.explained(request("a", LONG, 3, n=3, temperature=1.0))
    assert [course.index for course in found.choices] == [0, 1, 2]
    assert prefix(found).source == "none"
    assert [prefix(found, index).source for index in (1, 2)] == ["fork", "fork"]
    assert [prefix(found, index).differs for index in (1, 2)] == [None, None]
    assert all(course.tokens == 3 for course in found.choices)


def test_beams_are_told_each():
    loop = ExplainedLoop(num_blocks=40)
    [found] = loop.explained(request("a", LONG, 3, n=2, beam=BeamParams(width=3)))
    assert len(found.choices) == 3
    assert found.phases_ms["decode"] > 0
    assert found.choices[0].num_chunks == 1


def test_a_branch_shares_with_what_it_continues():
    loop = ExplainedLoop(num_blocks=40)
    loop.add(request("a", LONG, 6))
    while len(loop.scheduler._roster.history("a", 0)) != 10:
        loop.step()
    loop.fork("a", 0, [request("b", (), 2)])
    loop.drain()
    assert prefix(loop.explanation("b")).source == "fork"
    assert prefix(loop.explanation("b")).differs is None


# Why no more was cached.


def test_all_that_can_be_is_cached():
    loop = ExplainedLoop(num_blocks=40)
    loop.explained(request("a", LONG))
    [found] = loop.explained(request("b", LONG, arrival_s=loop.now))
    assert msgspec.structs.astuple(prefix(found)) == (6, 6, 6, "cache", None)


def test_another_token_is_told_to_the_position():
    loop = ExplainedLoop(num_blocks=40)
    loop.explained(request("a", (0, 1, 2, 0, 1, 1, 2)))
    loop.leave("a")
    [found] = loop.explained(request("b", (0, 1, 2, 1, 1, 1, 2), arrival_s=loop.now))
    assert prefix(found).cached_tokens == 2
    assert prefix(found).differs == Difference(3, "other_tokens", relative="a")


def test_who_goes_on_behind_the_end_of_another_is_not_told_of_other_tokens():
    loop = ExplainedLoop(num_blocks=40)
    loop.explained(request("a", (0, 1, 2), 2))
    loop.leave("a")
    answer = tuple(loop.answers["a"].token_ids)
    [found] = loop.explained(request("b", (0, 1, 2, *answer, 0, 1, 2), arrival_s=loop.now))
    assert prefix(found).differs == Difference(5, "not_seen")


def test_other_tenants_tokens_are_not_compared_with():
    """Only whole blocks tell: what is shared is told by the number of cached tokens in any case."""
    loop = ExplainedLoop(num_blocks=40)
    loop.explained(request("a", (0, 1, 2, 0, 1, 1, 2), tenant="lab"))
    [found] = loop.explained(request("b", (0, 1, 2, 1, 1, 1, 2), tenant="shop", arrival_s=loop.now))
    assert prefix(found).cached_tokens == 2
    assert prefix(found).differs == Difference(2, "not_seen")


def test_without_its_salt_it_would_have_been_found():
    loop = ExplainedLoop(num_blocks=40)
    loop.explained(request("a", LONG))
    [found] = loop.explained(request("b", LONG, salt=1, arrival_s=loop.now))
    assert prefix(found).differs == Difference(0, "salt")


@pytest.mark.parametrize(
    ("theirs", "mine", "reason"),
    [
        (b"", b"secret", "salt"),
        (b"secret", b"", "not_seen"),
        (b"secret", b"guess", "not_seen"),
        (b"lab@", b"lab@secret", "salt"),
        (b"lab@secret", b"lab@guess", "not_seen"),
        (b"lab@", b"shop@", "not_seen"),
        (b"", b"shop@", "not_seen"),
        (b"", b"shop@secret", "not_seen"),
        (b"lab@", b"", "not_seen"),
    ],
)
def test_nobody_learns_what_is_cached_under_a_salt_of_others(theirs, mine, reason):
    """A tenant that shares with nobody has a salt of its own, under which it may name others."""
    loop = ExplainedLoop(num_blocks=40)
    seeds = iter((1, 2))

    def salted(name, salt):
        wanted = request(name, LONG, salt=next(seeds), arrival_s=loop.now)
        return msgspec.structs.replace(wanted, cache_salt=salt)

    loop.explained(salted("a", theirs))
    [found] = loop.explained(salted("b", mine))
    assert prefix(found).differs == Difference(0, reason)


@pytest.mark.parametrize(("theirs", "mine", "model"), [(None, 1, "model"), (2, 1, "other"), (1, None, "one")])
def test_another_adapter_has_it(theirs, mine, model):
    loop = ExplainedLoop(num_blocks=40, max_loras=2, adapters={1: "one", 2: "other"})
    loop.explained(request("a", LONG, adapter=theirs))
    [found] = loop.explained(request("b", LONG, adapter=mine, arrival_s=loop.now))
    assert prefix(found).differs == Difference(0, "adapter", model=model)


def test_what_was_evicted_is_told():
    loop = ExplainedLoop(num_blocks=9, watermark=0.0)
    loop.explained(request("a", LONG))
    loop.explained(request("b", (2, 2, 1, 1, 0, 0, 2, 2, 0), 6, arrival_s=loop.now))
    assert loop.scheduler._cache._pool.num_evictions > 0
    [found] = loop.explained(request("c", LONG, arrival_s=loop.now))
    assert prefix(found).differs is not None
    assert prefix(found).differs.reason == "evicted"


def test_what_a_reset_forgot_counts_as_evicted_where_it_is_known_to_have_been_there():
    loop = ExplainedLoop(num_blocks=40)
    loop.explained(request("a", LONG))
    loop.leave("a")
    loop.scheduler.reset_prefix_cache()
    [found] = loop.explained(request("b", LONG, arrival_s=loop.now))
    assert prefix(found).differs == Difference(0, "evicted")
    [stranger] = loop.explained(request("c", (1, *LONG[1:]), tenant="lab", arrival_s=loop.now))
    assert prefix(stranger).differs == Difference(0, "not_seen")


def test_who_comes_beside_another_is_told_that_it_is_under_way():
    loop = ExplainedLoop(num_blocks=40, max_num_batched_tokens=32)
    _, second = loop.explained(request("a", LONG), request("b", LONG, arrival_s=0.00001))
    assert prefix(second).differs == Difference(0, "in_flight", relative="a")


def test_scores_of_the_prompt_need_it_computed():
    loop = ExplainedLoop(num_blocks=40)
    loop.explained(request("a", LONG))
    [found] = loop.explained(request("b", LONG, prompt_logprobs=1, arrival_s=loop.now))
    assert prefix(found).differs == Difference(0, "scored")


def test_without_a_cache_there_is_nothing_to_find():
    loop = ExplainedLoop(num_blocks=40, enable_prefix_caching=False)
    [found] = loop.explained(request("a", LONG))
    assert prefix(found).differs == Difference(0, "off")


def test_nothing_is_known_of_what_nobody_has_asked():
    loop = ExplainedLoop(num_blocks=40)
    [found] = loop.explained(request("a", LONG))
    assert prefix(found).differs == Difference(0, "not_seen")


# What is kept.


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(explainer, "MAX_KEPT", 3)
    monkeypatch.setattr(explainer, "MAX_REMEMBERED_TOKENS", 20)
    loop = ExplainedLoop(num_blocks=40)
    for i in range(6):
        loop.explained(request(f"r{i}", LONG, 2, arrival_s=loop.now))
        loop.leave(f"r{i}")
    kept = loop.observer._explainer
    assert list(kept._kept) == ["r3", "r4", "r5"]
    assert sum(len(one.token_ids) for one in kept._remembered) == kept._num_remembered_tokens <= 20
    assert loop.observer.explanation("r0") is None
    assert not loop.observer.is_watched


def test_chunks_and_preemptions_are_bounded(monkeypatch):
    monkeypatch.setattr(lives, "MAX_CHUNKS", 2)
    loop = ExplainedLoop(num_blocks=40, max_num_batched_tokens=2, long_prefill_token_threshold=1)
    loop.add(request("a", LONG, 2))
    loop.drain()
    [course] = loop.observer.explanation("a").choices
    assert (len(course.chunks), course.num_chunks) == (2, 7)


def test_evictions_are_bounded_and_told_on():
    told = []
    evictions = Evictions(lambda *it: told.append(it), max_hashes=2)
    for number, name in enumerate((b"a", b"b", b"a", b"c")):
        evictions(number, name)
    assert [name in evictions for name in (b"a", b"b", b"c")] == [True, False, True]
    assert len(evictions) == 2
    assert len(told) == 4


def test_an_explanation_that_was_told_stays_as_it_was():
    loop = ExplainedLoop(num_blocks=40)
    [found] = loop.explained(request("a", LONG))
    loop.now += 5.0
    assert loop.explanation("a") == found
    loop.leave("a")
    assert loop.explanation("a") == found


def test_a_request_that_did_not_ask_is_known_while_it_is_there():
    loop = ExplainedLoop(num_blocks=40, max_num_seqs=1, plain={"a", "b"})
    loop.add(msgspec.structs.replace(request("a", LONG, 9), name="first", tenant="lab"))
    loop.add(request("b", LONG, 9))
    assert not loop.observer.is_watched
    for _ in range(4):
        loop.step()
    found = loop.observer.find("first", "lab")
    assert (found.id, found.state, found.explained, found.queue, found.steps) == ("a", "running", False, None, None)
    assert sum(map(micro, found.phases_ms.values())) == micro(found.total_ms)
    assert found.choices[0].tokens == len(loop.answers["a"].token_ids)
    assert loop.observer.find("first", "") is None
    waits = loop.observer.find("b", "")
    assert (waits.state, waits.phases_ms["running"]) == ("waiting", 0.0)
    assert loop.observer._explainer is None
    assert loop.scheduler._cache._evictions is None
    loop.drain()
    assert loop.observer.find("first", "lab") is None

"""The laws of a Router: it always has an answer among the candidates, remembers little, sticks, and makes no herd."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.routing import Ask, PromptKeys, Reason, ReplicaReport, Router, RouterOptions, keys_of
from aserve.routing.digest import encode
from aserve.routing.notes import LONGEST_OPEN_S, MAX_KEYS
from aserve.routing.router import MAX_REPLICAS

REPLICAS = [f"r{place}" for place in range(16)]
COUNTS = st.integers(0, 2**53)
REPORTS = st.builds(
    ReplicaReport,
    taken_at=st.floats(0, 2e9),
    waiting_tokens=COUNTS,
    tokens_per_s=st.none() | st.floats(0.001, 1e9),
    num_requests=COUNTS,
    num_arrived_tokens=COUNTS,
    num_computed_tokens=COUNTS,
    bytes_per_token=st.floats(0.25, 256),
    adapters=st.lists(st.sampled_from("ab"), max_size=2).map(tuple),
    digest=st.none() | st.binary(max_size=40),
)
ASKS = st.builds(
    Ask,
    id=st.sampled_from("abcdef"),
    keys=st.builds(lambda text: keys_of({"prompt": text * 300}), st.sampled_from(["", "x", "xyz"])),
    session=st.sampled_from(["", "s", "t"]),
    adapter=st.sampled_from(["", "a", "b"]),
    num_tokens=st.none() | st.integers(-5, 2**40),
)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.sampled_from(REPLICAS[:4]), REPORTS),
        st.tuples(st.just("choose"), st.lists(st.sampled_from(REPLICAS[:4]), min_size=1, max_size=5), ASKS),
        st.tuples(st.just("routed"), st.sampled_from(REPLICAS[:4]), ASKS),
        st.tuples(st.just("completed"), st.sampled_from("abcdef"), st.none()),
        st.tuples(st.just("keep"), st.lists(st.sampled_from(REPLICAS[:4]), max_size=3), st.none()),
    ),
    max_size=40,
)


def ask(name: object, text: str = "", **others: Any) -> Ask:
    """A request of this prompt."""
    return Ask(id=str(name), keys=keys_of({"prompt": text}), **others)


def told(at: float, *, held: PromptKeys | None = None, **others: Any) -> ReplicaReport:
    """A report of a replica of 10 000 tokens a second that holds these beginnings."""
    return ReplicaReport(taken_at=at, **{"tokens_per_s": 1e4, "digest": encode(held.hashes if held else ()), **others})


def idle(now: float = 0.0, **others: Any) -> Router:
    """A router to 16 replicas that have nothing to do."""
    router = Router(RouterOptions(), seed=1)
    for name in REPLICAS:
        router.reported(name, told(now, **others), now)
    return router


def run(moves: list[Any], times: list[float]) -> list[Any]:
    """What a router answers to these moves; the laws that hold whatever they are."""
    router, answers = Router(RouterOptions(max_open=3, max_sessions=2, max_adapters=2), seed=7), []
    for (move, where, what), now in zip(moves, times, strict=False):
        if move == "report":
            router.reported(where, what, now)
        elif move == "choose":
            choice = router.choose(where, what, now)
            assert sorted(choice.ranked) == sorted(set(where))
            assert choice.expected_s >= 0 <= choice.cached_tokens
            answers.append(choice)
        elif move == "routed":
            router.routed(where, what, now)
        elif move == "completed":
            router.completed(where, now)
        else:
            router.keep_only(where)
        counts = router.statistics()
        assert counts.num_open <= 3
        assert counts.num_sessions <= 2
        assert 1 <= counts.others <= 64
    return answers


@given(MOVES, st.lists(st.floats(0, 2e9), min_size=40, max_size=40))
def test_whatever_it_is_told_it_answers_with_the_candidates_and_the_same_each_time(
    moves: list[Any], times: list[float]
):
    assert run(moves, times) == run(moves, times)


def test_without_candidates_there_is_no_answer():
    with pytest.raises(ValueError, match="candidates must be at least one"):
        Router().choose([], ask(0), 0.0)


@pytest.mark.parametrize(("name", "value"), [("sticky_s", -1), ("max_open", 0), ("tokens_per_s", 0.0)])
def test_options_out_of_bounds_are_named(name: str, value: float):
    with pytest.raises(ValueError, match=f"{name} must be a number of at least"):
        RouterOptions(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("sticky_s", 0.0), ("max_open", 1), ("tokens_per_s", 1.0)])
def test_options_at_their_bounds_are_taken(name: str, value: float):
    assert getattr(RouterOptions(**{name: value}), name) == value


def test_what_it_remembers_is_bounded():
    router = Router(RouterOptions(max_open=100, max_sessions=100))
    for number in range(1500):
        text = f"{number} " + "x" * 6000
        router.choose([f"r{number}", "one"], ask(number, text, session=str(number), adapter=str(number)), number / 10)
        router.reported("one", ReplicaReport(taken_at=number / 10), number / 10)
    counts = router.statistics()
    assert (counts.num_open, counts.num_sessions) == (100, 100)
    assert len(router._replicas) <= MAX_REPLICAS
    assert len(router._adapters) <= RouterOptions().max_adapters
    assert len(router._replicas["one"]) <= MAX_KEYS


def test_a_prompt_goes_where_it_is_held_until_the_queue_costs_more():
    keys = keys_of({"prompt": "x" * 40_000})  # about 10 000 tokens: a second
    router = idle()
    router.reported("r5", told(1.0, held=keys), 1.0)
    choice = router.choose(REPLICAS, ask("a", "x" * 40_000), 1.0)
    assert (choice.ranked[0], choice.reason) == ("r5", Reason.PREFIX)
    assert 9000 < choice.cached_tokens <= 10_000
    router.reported("r5", told(2.0, held=keys, waiting_tokens=20_000), 2.0)
    assert router.choose(REPLICAS, ask("b", "x" * 40_000), 2.0).ranked[0] == "r5"
    router.reported("r5", told(3.0, held=keys, waiting_tokens=50_000), 3.0)
    choice = router.choose(REPLICAS, ask("c", "x" * 40_000), 3.0)
    assert choice.ranked[0] != "r5"
    assert choice.reason is Reason.LOAD


def test_it_knows_what_it_sent_before_a_report_does_and_believes_later_reports():
    router = idle()
    first = router.choose(REPLICAS, ask(1, "y" * 8000), 10.0).ranked[0]
    assert router.choose(REPLICAS, ask(2, "y" * 8000), 10.1).ranked[0] == first
    router.completed("1", 11.0)
    router.completed("2", 11.0)
    router.reported(first, told(20.0), 20.0)  # evicted meanwhile
    assert router.choose(REPLICAS, ask(3, "y" * 8000), 20.0).reason is Reason.LOAD


def test_a_replica_that_tells_nothing_of_its_cache_is_known_by_what_was_sent():
    router = idle(digest=None)
    first = router.choose(REPLICAS, ask(1, "y" * 8000), 10.0).ranked[0]
    router.completed("1", 11.0)
    router.reported(first, told(20.0, digest=None), 20.0)
    assert router.choose(REPLICAS, ask(2, "y" * 8000), 20.0).ranked[0] == first


def test_sessions_stick_while_it_costs_little():
    router = idle()
    first = router.choose(REPLICAS, ask(0, session="s"), 0.1)
    assert first.reason is Reason.LOAD
    again = [router.choose(REPLICAS, ask(number, session="s"), 0.1) for number in range(1, 20)]
    assert {(choice.ranked[0], choice.reason) for choice in again} == {(first.ranked[0], Reason.SESSION)}
    router.reported(first.ranked[0], told(1.0, waiting_tokens=10_000), 1.0)  # a second behind
    assert router.choose(REPLICAS, ask(99, session="s"), 1.0).ranked[0] != first.ranked[0]


def test_adapters_go_where_they_are_loaded_and_are_loaded_elsewhere_when_that_is_sooner():
    router = idle()
    router.reported("r3", told(1.0, adapters=("lora",)), 1.0)
    chosen = [router.choose(REPLICAS, ask(number, adapter="lora"), 1.0) for number in range(10)]
    assert {(choice.ranked[0], choice.reason) for choice in chosen} == {("r3", Reason.ADAPTER)}
    router.reported("r3", told(2.0, adapters=("lora",), waiting_tokens=10_000), 2.0)
    other = router.choose(REPLICAS, ask(10, adapter="lora"), 2.0)
    assert other.ranked[0] != "r3"
    assert other.expected_s == 0.5
    assert router.choose(REPLICAS, ask(11, adapter="lora"), 2.0).ranked[0] == other.ranked[0]


@pytest.mark.parametrize("num_routers", [1, 8])
def test_1000_arrivals_between_two_reports_make_no_herd(num_routers: int):
    routers = [Router(seed=seed) for seed in range(num_routers)]
    for router in routers:
        for place, name in enumerate(REPLICAS):  # one of them looks much better than the others
            router.reported(name, told(0.0, waiting_tokens=0 if place == 0 else 20_000), 0.0)
    sent: Counter[str] = Counter(dict.fromkeys(REPLICAS[1:], 20000))
    for number in range(1000):
        text = f"{number:05} " * 200 if number % 3 else "hot " * 1000
        choice = routers[number % num_routers].choose(REPLICAS, ask(number, text), number / 1e4)
        sent[choice.ranked[0]] += len(text) // 4 - choice.cached_tokens
    assert max(sent.values()) / (sum(sent.values()) / len(REPLICAS)) < (1.25 if num_routers == 1 else 1.5)


def test_a_hot_prefix_spreads_over_replicas():
    router, text = idle(), "hot " * 10_000
    chosen = Counter(router.choose(REPLICAS, ask(number, text), number / 1000).ranked[0] for number in range(1000))
    assert len(chosen) == len(REPLICAS)
    assert max(chosen.values()) < 2 * 1000 / len(REPLICAS)


def test_routers_find_out_how_many_they_are():
    router = idle()
    for number in range(1, 200):
        router.choose(REPLICAS, ask(number, num_tokens=100), number)
        for name in REPLICAS:  # each gets 25 tokens a second of four routers
            router.reported(name, told(number + 0.5, num_arrived_tokens=25 * number), number + 0.5)
    assert 3.5 < router.statistics().others < 4.5


def test_what_another_replica_took_is_moved_and_unknown_ends_are_ignored():
    router = idle()
    choice = router.choose(REPLICAS, ask("a", "z" * 40_000), 1.0)
    taker = choice.ranked[-1]
    router.routed(taker, ask("a", "z" * 40_000), 1.0)
    assert router._replicas[choice.ranked[0]].backlog(1.0, 1e4) == 0
    assert router._replicas[taker].backlog(1.0, 1e4) == pytest.approx(10_000)
    assert router._replicas[taker].backlog(1.25, 1e4) == pytest.approx(7_500), "a quarter of a second's"
    router.completed("nobody", 2.0)
    assert router.statistics().num_open == 1
    router.choose(REPLICAS, ask("b"), 2.0 + LONGEST_OPEN_S)
    assert router.statistics().num_open == 1, "nobody told of the first one's end"

"""What a simulation is made of, each part alone: steps and gaps that are read, made-up tokens, costs and figures."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from aserve.core.errors import ConfigError
from aserve.core.ids import BlockId, HostBlockId, RequestId, Row, SeqId
from aserve.core.layout import Footprint, stretched
from aserve.core.plan import BlockOps, SeqSlice
from aserve.recording.records import Arrived, Ended, Init, Landed, Plan, Planned, Record, TakenBack
from aserve.scheduler.step_cost import Load
from aserve.simulation.changes import changed, check_name
from aserve.simulation.costs import LEAST_STEPS, Costs
from aserve.simulation.meter import Figures, Meter
from aserve.simulation.simulator import Simulator
from aserve.simulation.traffic import STOP, Answer, Contents, Kind, TrafficReader, Visit, read_traffic, step_of
from tests.simulation.test_simulator import one_by_one, written
from tests.simulation.worlds import config_of

LOAD = Load(4, 4, 100)
PIECE = SeqSlice(SeqId(0), Row(0), 0, 8, (0,) * 8, (BlockId(1),), 1)


def read(*records: Record) -> TrafficReader:
    reader = TrafficReader()
    for record in records:
        reader.take(record)
    return reader


def arrived(name: str, at_s: float = 0.0, num_tokens: int = 4, **fields: object) -> Arrived:
    return Arrived(at_s, RequestId(name), at_s, 8, 1, num_tokens, **fields)  # type: ignore[arg-type]  # mixed fields


def step_records(step_id: int, planned_s: float, landed_s: float) -> tuple[Record, ...]:
    return Planned(planned_s, Plan(step_id, (PIECE,))), Landed(landed_s, step_id, landed_s - planned_s, (7,))


# What is read.


def test_blocks_that_went_either_way_were_moved():
    def moved(block_id: int, host_id: int) -> tuple[BlockId, HostBlockId]:
        return BlockId(block_id), HostBlockId(host_id)

    ops = BlockOps(swap_outs=(moved(1, 1), moved(2, 2)), swap_ins=((HostBlockId(3), BlockId(3)),))
    assert step_of(Plan(0, (PIECE,), block_ops=ops), Kind.PROMPT, None, 1.0).num_moved == 3
    assert step_of(Plan(0, (PIECE,)), Kind.PROMPT, None, 1.0).num_moved == 0


def test_the_gap_before_a_step_is_from_a_landing_while_somebody_was_there():
    reader = read(
        arrived("a"),
        *step_records(0, 0.0, 1.0),
        *step_records(1, 1.25, 2.0),
        Planned(2.5, Plan(2, (PIECE,))),
        TakenBack(2.6, (2,)),
        Planned(2.75, Plan(3, (PIECE,))),
        Planned(2.8, Plan(4, (PIECE,))),
        Landed(3.0, 3, 0.25, (7,)),
        Landed(3.5, 4, 0.5, (7,)),
        Ended(3.5, RequestId("a"), 0, 4, 0),
        arrived("b", 9.0),
        *step_records(5, 9.0, 9.5),
    )
    assert [step.gap_s for step in reader.steps] == [None, 0.25, None, None, None]


def test_a_step_of_which_it_is_not_known_what_it_took_is_not_learned_from():
    reader = read(arrived("a"), Planned(0.0, Plan(0, (PIECE,))), Landed(1.0, 0, 0.0, (7,)), *step_records(1, 1.5, 2.0))
    assert [(step.at_s, step.took_s, step.gap_s) for step in reader.steps] == [(1.5, 0.5, 0.5)]


def test_the_first_step_that_only_decodes_behind_prompts_is_of_a_kind_of_its_own():
    reader = read(arrived("a"))
    for step_id, num_tokens in enumerate((3, 2, 1, 1, 3, 1)):
        plan = Plan(step_id, (replace(PIECE, num_tokens=num_tokens),))
        reader.take(Planned(float(step_id), plan))
        reader.take(Landed(step_id + 0.5, step_id, 0.5, (7,)))
    assert [step.kind for step in reader.steps] == [
        *(Kind.PROMPT, Kind.PROMPT, Kind.BEHIND, Kind.DECODE, Kind.PROMPT, Kind.BEHIND)
    ]


# Made-up tokens.


def visit(number: int, *chains: tuple[bytes, ...]) -> Visit:
    answers = {index: Answer(4, chain, 1.0) for index, chain in enumerate(chains)}
    return Visit(number, Arrived(0.0, RequestId(str(number)), 0.0, 24, len(chains), 4), answers)


def test_a_prompt_is_shared_as_far_as_the_longest_answer_tells():
    contents = Contents(8)
    first, other = contents.prompt(visit(0, (b"1",), (b"1", b"2"))), contents.prompt(visit(1, (b"1", b"2", b"3")))
    assert first[:16] == other[:16]
    assert not set(first[16:]) & set(other)
    assert len(set(first)) == 24, "no token comes twice"


def test_an_answer_ends_with_its_last_token_and_one_of_which_nothing_is_known_with_the_longest():
    contents, both = Contents(8), visit(0, (b"1",), (b"1",))
    both.answers = {0: Answer(4, (), 1.0), 1: Answer(6, (), 1.0)}
    for index, num_tokens in ((0, 4), (1, 6), (2, 6)):
        tokens = [contents.answer(both, index, place) for place in range(num_tokens + 1)]
        assert [token == STOP for token in tokens] == [False] * (num_tokens - 1) + [True] * 2


# Costs.


def test_a_kind_of_step_has_prices_of_its_own_once_there_are_enough():
    for num_prompts, took_s in ((LEAST_STEPS - 1, 0.010), (LEAST_STEPS, 0.018)):
        places = set(range(0, 6 * num_prompts, 6))
        steps = one_by_one((LOAD, 0.018 if place in places else 0.010, place in places) for place in range(100))
        found = Costs(steps, swap_s=0.0).seconds(steps[0]._replace(at_s=100.0))
        assert found == pytest.approx(took_s, rel=0.01), num_prompts


def test_a_step_behind_prompts_takes_as_much_longer_as_such_steps_did():
    """The fault: what follows a prompt was taken for a slow machine, on which longer prompts took too long."""
    steps = one_by_one((LOAD, 0.014 if place % 6 == 1 else 0.010, place % 6 == 0) for place in range(120))
    steps = [step._replace(kind=Kind.BEHIND) if place % 6 == 1 else step for place, step in enumerate(steps)]
    costs = Costs(steps, swap_s=0.0)
    for kind, took_s in ((Kind.PROMPT, 0.010), (Kind.BEHIND, 0.014), (Kind.DECODE, 0.010)):
        assert costs.seconds(steps[0]._replace(at_s=100.0, kind=kind)) == pytest.approx(took_s, rel=0.01)
    assert costs.seconds(steps[0]._replace(at_s=steps[1].at_s)) == pytest.approx(0.010, rel=0.01), "all are as usual"
    few = Costs([*steps[2:6] * 20, steps[1]], swap_s=0.0)
    assert few.seconds(steps[1]._replace(at_s=100.0)) == pytest.approx(0.010, rel=0.01)


def test_what_begins_before_a_recording_or_lasts_beyond_it_goes_on_as_usual():
    """The machine was as usual for a second, from the fifth on; ten thousand blocks take a hundred."""
    steps = [step._replace(at_s=step.at_s + 5.0) for step in one_by_one([(LOAD, 0.010, False)] * 100)]
    steps = [step._replace(landed_s=step.landed_s + 5.0) for step in steps]
    costs = Costs(steps, swap_s=0.010)
    for at_s in (0.5, 4.5, 5.5, 6.0, 6.5):
        assert costs.seconds(steps[0]._replace(at_s=at_s, num_moved=10_000)) == pytest.approx(100.010), at_s
    assert costs.seconds(steps[0]._replace(at_s=1.0)) == pytest.approx(0.010)


def test_gaps_are_drawn_from_those_of_their_time():
    steps = one_by_one([(LOAD, 0.010, False)] * 100)
    steps = [step._replace(gap_s=None if place % 3 else 0.001 + place // 50) for place, step in enumerate(steps)]
    costs = Costs(steps, swap_s=0.0)
    late = [step for step in steps if step.gap_s is not None][-1]
    assert {round(costs.gap_s(0.0), 4) for _ in range(99)} == {0.001, 1.001}, "24 of 34 are near"
    assert costs.gap_s(0.0) in {step.gap_s for step in steps}
    assert late.gap_s == 1.001
    assert Costs([step._replace(gap_s=None) for step in steps], swap_s=0.0).gap_s(0.5) == 0.0


# Figures.


def figures(*records: Record) -> Figures:
    meter = Meter()
    for record in records:
        meter.tell(record)
    return meter.figures()


def one_request(name: str, seq_id: int, first_s: float, end_s: float) -> list[Record]:
    """One that comes at 10, and has two tokens, at these times."""
    request = RequestId(name)
    init = Init(Row(0), SeqId(seq_id), (), (0.0, 0, 1.0, 0.0, 0), request_id=request, num_prompt=8)
    pieces = [SeqSlice(SeqId(seq_id), Row(0), 0, 8, (0,) * 8, (BlockId(1),), 1)]
    pieces.append(SeqSlice(SeqId(seq_id), Row(0), 8, 1, num_samples=1))
    return [
        Planned(10.0, Plan(2 * seq_id, (pieces[0],), (init,))),
        Landed(first_s, 2 * seq_id, 0.1, (7,)),
        Planned(first_s, Plan(2 * seq_id + 1, (pieces[1],))),
        Landed(end_s, 2 * seq_id + 1, 0.1, (7,)),
        Ended(end_s, request, 0, 2, 4),
    ]


def test_the_figures_of_three_requests():
    """First tokens after 1, 2 and 4 s, the next ones 1, 3 and 7 s later."""
    comes = [Arrived(10.0, RequestId(name), 10.0, 8, 1, 2) for name in "abc"]
    times = ((11.0, 12.0), (12.0, 15.0), (14.0, 21.0))
    ran = [one_request(name, place, *times[place]) for place, name in enumerate("abc")]
    found = figures(*comes, *(record for records in ran for record in records))
    assert (found.ttft_p50_s, found.itl_p50_s, found.latency_p50_s) == (2.0, 3.0, 5.0)
    assert (found.ttft_p99_s, found.itl_p99_s, found.latency_p99_s) == pytest.approx((3.96, 6.92, 10.88))
    assert (found.requests, found.refused, found.steps, found.output_tokens, found.seconds) == (3, 0, 6, 6, 11.0)
    assert (found.output_tokens_per_s, found.total_tokens_per_s) == pytest.approx((6 / 11, 30 / 11))
    assert (found.hit_rate, found.preemptions) == (0.5, 0)


def test_nothing_is_kept_of_who_has_ended():
    meter = Meter()
    for record in (Arrived(10.0, RequestId("a"), 10.0, 8, 1, 2), *one_request("a", 0, 11.0, 12.0)):
        meter.tell(record)
    kept = {name: value for name, value in vars(meter).items() if isinstance(value, dict | set)}
    assert {name: value for name, value in kept.items() if value} == {}


def test_who_left_without_a_token_has_no_latency_and_counts_as_a_request():
    found = figures(arrived("a"), Ended(1.0, RequestId("a"), 0, 0, 0), arrived("b", 2.0))
    assert (found.requests, found.output_tokens, found.hit_rate) == (2, 0, 0.0)
    assert found.latency_p50_s != found.latency_p50_s, "there is nothing to measure"


# Whole simulations.


def test_who_left_without_a_token_leaves_again(tmp_path: Path):
    """There is one row, and the first answer takes longer than the other one waited."""
    records = [*step_records(0, 0.0, 0.02), arrived("a", 1.0, 20), arrived("b", 1.0, 9)]
    records += [Ended(1.1, RequestId("b"), 0, 0, 0), Ended(2.0, RequestId("a"), 0, 20, 0)]
    traffic = read_traffic(written(tmp_path, records))
    found = Simulator(traffic, changed(traffic.header.config, {"max_num_seqs": 1})).run()
    assert (found.requests, found.output_tokens) == (2, 20)


def test_what_came_before_the_scheduler_is_part_of_the_wait(tmp_path: Path):
    late = Arrived(1.0, RequestId("a"), 0.75, 8, 1, 4)
    traffic = read_traffic(written(tmp_path, [*step_records(0, 0.0, 0.02), late, Ended(2.0, RequestId("a"), 0, 4, 0)]))
    assert Simulator(traffic, traffic.header.config).run().ttft_p50_s == pytest.approx(0.27)


@pytest.mark.parametrize(("scores_prompt", "hit_rate"), [(False, 0.25), (True, 0.0)])
def test_a_prompt_that_is_scored_is_computed_whole(scores_prompt: bool, hit_rate: float, tmp_path: Path):
    """Two prompts of two blocks, of which the first is the same; the second comes when the first is answered."""
    records: list[Record] = [*step_records(0, 0.0, 0.02)]
    for number, name in enumerate("ab"):
        come = Arrived(float(number), RequestId(name), float(number), 16, 1, 2, scores_prompt=scores_prompt)
        records += [come, Ended(number + 0.5, RequestId(name), 0, 2, 0, (b"one", name.encode()))]
    traffic = read_traffic(written(tmp_path, records))
    assert Simulator(traffic, traffic.header.config).run().hit_rate == hit_rate


# What may be changed.


def test_a_name_that_cannot_be_changed_is_told_with_the_nearest_that_can():
    check_name("max_num_seqs")
    with pytest.raises(ConfigError, match=r"unknown name max_num_seq; did you mean max_num_seqs\?"):
        check_name("max_num_seq")
    with pytest.raises(ConfigError, match=r"unknown name xyz; there are block_size, .*, speed"):
        check_name("xyz")


def test_a_sequence_of_the_greatest_length_has_to_fit():
    assert changed(config_of(), {"num_blocks": 17}).num_blocks == 17
    with pytest.raises(ConfigError, match="num_blocks: 16 hold no sequence of max_model_len 128, which takes 16"):
        changed(config_of(), {"num_blocks": 16})


@pytest.mark.parametrize("threshold", [8, 1000])
def test_a_windows_blocks_are_those_of_the_longest_chunk_that_there_can_be(threshold):
    """Catches a chunk taken for as long as the greater of what a step and what a long prompt may have."""
    budget = 16 if threshold > 16 else 64
    windowed = config_of(
        kv_windows=(8,), long_prefill_token_threshold=threshold, max_num_batched_tokens=budget, max_model_len=1024
    )
    chunk = min(threshold, stretched(budget, budget))
    needed = Footprint((8,), 8, chunk).peak(1024)
    assert needed < 10 < 1024 // 8
    assert changed(windowed, {"num_blocks": needed + 1}).num_blocks == needed + 1
    with pytest.raises(ConfigError, match=f"num_blocks: {needed} hold no sequence"):
        changed(windowed, {"num_blocks": needed})


def test_with_windows_two_steps_are_in_flight_at_most():
    windowed = config_of(kv_windows=(None, 16))
    assert changed(windowed, {"max_in_flight": 2}).max_in_flight == 2
    assert changed(config_of(), {"max_in_flight": 3}).max_in_flight == 3
    with pytest.raises(ConfigError, match="2 at most with sliding windows, got 3"):
        changed(windowed, {"max_in_flight": 3})


def test_what_prompts_share_is_not_known_of_a_recording_without_a_prefix_cache():
    without = config_of(enable_prefix_caching=False)
    assert not changed(without, {"enable_prefix_caching": False}).enable_prefix_caching
    with pytest.raises(ConfigError, match="recorded without"):
        changed(without, {"enable_prefix_caching": True})

"""Simulations: the same twice, and changed by what is changed."""

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from aserve.core.errors import ConfigError, RecordingError
from aserve.core.ids import BlockId, RequestId, Row, SeqId
from aserve.core.plan import SeqSlice
from aserve.core.speculation import SpeculativeConfig
from aserve.recording.files import Recording, first_bytes, frame, pack
from aserve.recording.records import Arrived, Ended, Init, Landed, Plan, Planned, TakenBack
from aserve.scheduler.step_cost import Load, Prices, prices_of
from aserve.simulation.changes import changed
from aserve.simulation.costs import Costs
from aserve.simulation.meter import Meter
from aserve.simulation.simulator import Simulator
from aserve.simulation.traffic import STOP, Contents, Kind, Step, Traffic, read_traffic
from tests.recording.recorded import header, record
from tests.simulation.worlds import config_of

PRICES = Prices(base=0.005, token=0.0001, row=0.0005, key=0.0)


def one_by_one(steps: Iterable[tuple[Load, float, bool]], gap_s: float = 0.0) -> list[Step]:
    """Steps, of which each begins when the one before it has landed."""
    made, at_s = [], 0.0
    for load, took_s, has_prompt in steps:
        kind = Kind.PROMPT if has_prompt else Kind.DECODE
        made.append(Step(load, at_s, took_s, 0, kind, gap_s, at_s + took_s))
        at_s += took_s + gap_s
    return made


def paid(traffic: Traffic) -> Traffic:
    """The same traffic with steps that take exactly their price."""
    loads = [Load(tokens, rows, tokens * 37 % 500) for tokens in range(1, 65) for rows in range(1, min(tokens, 8) + 1)]
    steps = one_by_one((load, PRICES.of(load), has_prompt) for load in loads for has_prompt in (False, True))
    return traffic._replace(steps=steps)


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    return record(tmp_path / "a.rec", has_prompts=False)


def test_two_simulations_are_the_same(recording: Recording):
    traffic = read_traffic(recording)
    one, other = (Simulator(traffic, recording.header.config).run() for _ in range(2))
    assert one == other


def test_all_requests_and_tokens_come_up(recording: Recording):
    traffic = read_traffic(recording)
    found = Simulator(traffic, recording.header.config).run()
    assert found.requests == traffic.figures.requests == 6
    assert found.refused == 0
    answered = sum(answer.num_tokens for visit in traffic.visits for answer in visit.answers.values())
    assert found.output_tokens >= answered


def test_what_was_shared_is_found_again(recording: Recording):
    traffic, config = paid(read_traffic(recording)), changed(recording.header.config, {"max_num_seqs": 1})
    assert Simulator(traffic, config).run().hit_rate > 0.3, "two of three requests begin with the same two blocks"
    assert Simulator(traffic, changed(config, {"enable_prefix_caching": False})).run().hit_rate == 0.0


def test_time_is_the_prices_alone(recording: Recording):
    """Nothing is read but recorded times: 6 requests that came together, one row a step."""
    traffic = paid(read_traffic(recording))
    config = changed(recording.header.config, {"max_num_seqs": 1, "max_in_flight": 1, "enable_prefix_caching": False})
    found = Simulator(traffic, config).run()
    floor = found.output_tokens * (PRICES.base + PRICES.token + PRICES.row)
    assert floor < found.seconds < 2 * floor
    assert found.itl_p50_s == pytest.approx(PRICES.base + PRICES.token + PRICES.row, rel=0.01)


def test_less_room_takes_longer(recording: Recording):
    traffic = paid(read_traffic(recording))
    config = recording.header.config
    all_at_once = Simulator(traffic, config).run()
    one_by_one = Simulator(traffic, changed(config, {"max_num_seqs": 1})).run()
    assert one_by_one.seconds > 1.5 * all_at_once.seconds
    assert one_by_one.steps > all_at_once.steps
    short = Simulator(traffic, changed(config, {"num_blocks": 10, "max_model_len": 64})).run()
    assert short.preemptions > 0


def test_requests_that_do_not_fit_are_refused(recording: Recording):
    traffic = read_traffic(recording)
    found = Simulator(traffic, changed(recording.header.config, {"max_num_queued_reqs": 1, "max_num_seqs": 1})).run()
    assert found.refused > 0
    assert found.requests == 6


def test_who_comes_faster_waits_longer(tmp_path: Path):
    records = [
        one
        for number in range(20)
        for one in (
            Arrived(number * 0.1, RequestId(str(number)), number * 0.1, 8, 1, 4),
            Ended(number * 0.1 + 0.05, RequestId(str(number)), 0, 4, 0),
        )
    ]
    piece = SeqSlice(SeqId(0), Row(0), 0, 8, (0,) * 8, (BlockId(1),), 1)
    steps = [Planned(0.0, Plan(0, (piece,))), Landed(0.02, 0, 0.02, (0,))]
    traffic = read_traffic(written(tmp_path, [*steps, *records]))
    calm = Simulator(traffic, config_of()).run()
    busy = Simulator(traffic, config_of(), speed=100.0).run()
    assert calm.ttft_p50_s == pytest.approx(0.02, rel=0.01)
    assert busy.ttft_p50_s > calm.ttft_p50_s
    assert busy.seconds < calm.seconds


def written(tmp_path: Path, records: list, **fields: object) -> Recording:
    path = tmp_path / "made.rec"
    path.write_bytes(first_bytes(header(config_of(**fields))) + frame(pack(records, len(records))))
    return Recording(path)


def test_what_cannot_be_simulated_is_refused(tmp_path: Path):
    with pytest.raises(RecordingError, match="no step has landed in it"):
        read_traffic(written(tmp_path, []))
    with pytest.raises(RecordingError, match="drafts are not simulated"):
        read_traffic(written(tmp_path, [], speculative_config=SpeculativeConfig()))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"block_size": 24}, "block_size must be one of 8, 16"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, got 0"),
        ({"num_blocks": 3}, "num_blocks: 3 hold no sequence of max_model_len 128, which takes 16"),
        ({"preemption_mode": "swap"}, "preemption_mode swap needs num_host_blocks"),
        ({"speed": 0.0}, "speed must be"),
    ],
)
def test_changes_that_do_not_go_together(changes: dict, told: str):
    with pytest.raises(ConfigError, match=told):
        changed(config_of(), changes)


def test_blocks_of_another_size_take_the_same_memory():
    assert changed(config_of(num_blocks=65), {"block_size": 16}).num_blocks == 33


def test_prices_are_found_again():
    loads = [Load(tokens, rows, keys) for tokens in (1, 8, 64) for rows in (1, 4) for keys in (10, 500)]
    assert prices_of((load, PRICES.of(load)) for load in loads) == pytest.approx(PRICES, rel=1e-3, abs=1e-8)


def test_steps_at_their_time_take_what_they_took():
    """However slow the machine was, stood still or hurried."""
    rng = random.Random(0)
    loads = [Load(rows, rows, rows * rng.randint(1, 300)) for rows in rng.choices(range(1, 33), k=200)]
    noise = [rng.lognormvariate(0.0, 0.3) * rng.choice([1.0] * 20 + [10.0]) for _ in loads]
    steps = one_by_one(
        (load, PRICES.of(load) * times, rng.random() < 0.3) for load, times in zip(loads, noise, strict=True)
    )
    costs = Costs(steps, swap_s=0.0)
    assert [costs.seconds(step) for step in steps] == pytest.approx([step.took_s for step in steps])


def test_a_slow_while_is_slow_for_all_and_as_long():
    """The first second the machine was as usual, the next half as fast; kinds have usual times of their own."""
    steps = one_by_one([(Load(4, 4, 100), 0.010, False)] * 100 + [(Load(4, 4, 100), 0.020, False)] * 50, gap_s=0.001)
    steps = [*steps, *(step._replace(kind=Kind.PROMPT) for step in steps[:100])]
    costs = Costs(steps, swap_s=0.0)
    step = steps[0]
    assert costs.seconds(step._replace(at_s=0.2)) == pytest.approx(0.010, rel=0.05)
    assert costs.seconds(step._replace(at_s=1.5)) == pytest.approx(0.020, rel=0.05)
    assert costs.seconds(step._replace(at_s=100.0)) == pytest.approx(0.020, rel=0.05), "behind its end as at its end"
    assert costs.gap_s(0.5) == 0.001


def test_blocks_that_are_moved_take_their_own_time_beside_what_is_computed():
    steps = one_by_one((Load(4, 4, 100), 0.010 + 0.006 * (place % 2), False) for place in range(100))
    steps = [step._replace(num_moved=3 * (place % 2)) for place, step in enumerate(steps)]
    costs = Costs(steps, swap_s=0.002)
    for num_moved, took_s in ((0, 0.010), (3, 0.016), (5, 0.020)):
        assert costs.seconds(steps[0]._replace(at_s=0.6, num_moved=num_moved)) == pytest.approx(took_s, rel=0.01)


def test_who_comes_while_all_stands_still_waits_for_its_end():
    steps = one_by_one((Load(4, 4, 100), 0.510 if place == 50 else 0.010, False) for place in range(100))
    costs = Costs(steps, swap_s=0.0)  # it stood still from 0.505 to 1.005
    step = steps[0]
    took = {
        at_s: round(costs.seconds(step._replace(at_s=at_s)), 4) for at_s in (0.4, 0.498, 0.502, 0.7, 1.0, 1.004, 1.1)
    }
    assert took == {0.4: 0.01, 0.498: 0.51, 0.502: 0.51, 0.7: 0.315, 1.0: 0.015, 1.004: 0.011, 1.1: 0.01}
    assert costs.seconds(step._replace(at_s=0.3), speed=2.0) == pytest.approx(0.010)


def test_a_recording_that_was_cut_is_simulated_up_to_there(tmp_path: Path):
    """Nobody's answer ends with the recording: it goes on as long as there is one."""
    request = RequestId("a")
    init = Init(Row(0), SeqId(0), (), (0.0, 0, 1.0, 0.0, 0), request_id=request, num_prompt=8)
    pieces = [SeqSlice(SeqId(0), Row(0), 0, 8, (0,) * 8, (BlockId(1),), 1)]
    pieces += [SeqSlice(SeqId(0), Row(0), 7 + number, 1, num_samples=1) for number in range(1, 30)]
    records: list = [Arrived(1.0, request, 1.0, 8, 1, 100)]
    for number, piece in enumerate(pieces):
        at_s = 1.0 + number * 0.1
        records += [Planned(at_s, Plan(number, (piece,), () if number else (init,)))]
        records += [Landed(at_s + 0.1, number, 0.1, (7,))]
    traffic = read_traffic(written(tmp_path, records, max_in_flight=1))
    assert traffic.cut_s == pytest.approx(4.0)
    found = Simulator(traffic, traffic.header.config).run()
    assert traffic.figures.output_tokens == 30
    assert 29 <= found.output_tokens <= 30
    assert found.itl_p50_s == pytest.approx(0.1, rel=0.01)
    slower = Simulator(
        traffic._replace(steps=[step._replace(took_s=0.3) for step in traffic.steps]), traffic.header.config
    )
    assert 9 <= slower.run().output_tokens <= 10


def test_who_has_not_arrived_has_not_ended(tmp_path: Path):
    """As where its arrival broke the bookkeeping."""
    piece = SeqSlice(SeqId(0), Row(0), 0, 8, (0,) * 8, (BlockId(1),), 1)
    records = [Planned(0.0, Plan(0, (piece,))), Landed(0.1, 0, 0.1, (1,)), Ended(0.2, RequestId("a"), 0, 1, 0)]
    traffic = read_traffic(written(tmp_path, records))
    assert (traffic.visits, traffic.figures.requests) == ([], 0)


def test_tokens_are_shared_where_blocks_were(recording: Recording):
    traffic = read_traffic(recording)
    contents = Contents(8)
    prompts = [contents.prompt(visit) for visit in traffic.visits]
    assert prompts[1][:16] == prompts[3][:16] == prompts[5][:16]
    assert prompts[2][8:] != prompts[1][8:11], "no full block behind the first was shared"
    assert contents.answer(traffic.visits[0], 0, 3) == STOP


def test_the_meter_tells_what_happened():
    meter = Meter()
    request = RequestId("a")
    init = Init(Row(0), SeqId(0), (), (0.0, 0, 1.0, 0.0, 0), request_id=request, num_prompt=4)
    first = SeqSlice(SeqId(0), Row(0), 0, 4, (0,) * 4, (BlockId(1),), 1)
    after = SeqSlice(SeqId(0), Row(0), 4, 1, num_samples=1)
    for one in (
        Arrived(10.0, request, 9.5, 4, 1, 8),
        Planned(10.0, Plan(0, (first,), (init,))),
        Landed(10.1, 0, 0.1, (7,)),
        Planned(10.1, Plan(1, (after,))),
        TakenBack(10.15, (1,)),
        Planned(10.2, Plan(2, (after,), (init,))),
        Landed(10.4, 2, 0.2, (7,)),
        Ended(10.4, request, 0, 2, 2),
    ):
        meter.tell(one)
    found = meter.figures()
    assert (found.requests, found.output_tokens, found.steps, found.preemptions) == (1, 2, 2, 1)
    assert found.ttft_p50_s == pytest.approx(0.6)
    assert found.itl_p50_s == pytest.approx(0.3)
    assert found.latency_p50_s == pytest.approx(0.9)
    assert found.hit_rate == 0.5
    assert found.output_tokens_per_s == pytest.approx(2 / 0.9)

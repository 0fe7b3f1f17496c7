"""The cost model of a step: what it learns, and what a step with prompts may then compute beside those who decode."""

import random

import pytest

from aserve.core.graph_sizes import GraphSizes
from aserve.core.ids import Row, SeqId
from aserve.core.plan import SeqSlice
from aserve.scheduler.step_cost import LATE_S, MAX_LATE, Load, Prices, StepCost, StreamPace, prices_of
from tests.scheduler.simulation import STEP_S, TOKEN_S, Arrival, Simulation, simulate
from tests.scheduler.sync_loop import SyncLoop, request

TRUE = Prices(base=0.05, token=0.002, row=0.001, key=2e-6)
QUICK = Prices(base=0.002, token=2e-5, row=1e-5, key=2e-9)
"""Of which 10,000 tokens take no longer than a step that is late may."""


def decode(context: int) -> SeqSlice:
    return SeqSlice(SeqId(0), Row(0), context - 1, 1, (), (), True)


def chunk(start: int, num_tokens: int) -> SeqSlice:
    return SeqSlice(SeqId(1), Row(1), start, num_tokens, (0,) * num_tokens, (), True)


def traffic(seed: int, num_steps: int, *, num_rows: tuple[int, int] = (1, 32)) -> list[list[SeqSlice]]:
    rng = random.Random(seed)
    steps = []
    for number in range(num_steps):
        slices = [decode(rng.randint(10, 2000)) for _ in range(rng.randint(*num_rows))]
        steps.append([*slices, chunk(rng.randint(0, 1000), rng.randint(16, 500))] if number % 7 == 0 else slices)
    return steps


def test_keys_are_read_once_for_each_tile_of_queries():
    assert Load.of([decode(100), decode(50)]) == (2, 2, 150)
    assert Load.of([chunk(1536, 512)]) == (512, 1, 4 * 2048)


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.01), (0.1, 0.1)])
def test_it_finds_the_prices_and_knows_how_wrong_it_is(noise, tolerance):
    cost, rng = StepCost(), random.Random(1)
    for slices in traffic(0, 1400):
        cost.landed(slices, TRUE.of(Load.of(slices)) * rng.uniform(1 - noise, 1 + noise))
    prices = cost.prices()
    for slices in traffic(1, 100):
        load = Load.of(slices)
        assert prices.of(load) == pytest.approx(TRUE.of(load), rel=tolerance)
    assert 0.3 * noise <= cost.error <= 0.7 * noise + 0.01  # of even noise in [-x, x] the mean is x / 2


def test_slow_steps_are_priced_as_exactly():
    """Of a device that takes minutes: how large the features are does not matter."""
    slow = Prices(*(1000 * price for price in TRUE))
    loads = [Load.of(slices) for slices in traffic(4, 30)]
    prices = prices_of((load, slow.of(load)) for load in loads)
    assert prices == pytest.approx(slow, rel=1e-3)


def test_what_one_row_takes_is_the_steps_until_several_were_seen():
    """The fault: four who decode were believed to take four times as long as one, and others' prompts as much."""
    cost = StepCost()
    for slices, seconds in [([chunk(0, 128)], 0.7), ([chunk(0, 128)], 0.8), ([chunk(0, 128)] * 4, 4.0)]:
        cost.landed(slices, seconds)
    for length in range(130, 200):
        cost.landed([decode(length)], 0.09)
    assert cost.prices().of(Load(4, 4, 600)) < 2 * 0.09


def test_it_follows_a_device_that_becomes_slower():
    cost = StepCost()
    for factor in (1.0, 2.0):
        for slices in traffic(2, 1400):
            cost.landed(slices, factor * TRUE.of(Load.of(slices)))
    assert cost.prices().of(Load(100, 10, 5000)) == pytest.approx(2 * TRUE.of(Load(100, 10, 5000)), rel=0.05)


def test_one_stall_does_not_undo_it():
    cost = StepCost()
    for slices in traffic(3, 700):
        cost.landed(slices, TRUE.of(Load.of(slices)))
    cost.landed([decode(100), chunk(0, 100)], 20.0)
    load = Load(150, 20, 10_000)
    assert cost.prices().of(load) == pytest.approx(TRUE.of(load), rel=0.2)


def noticed_late(seed: int, num_steps: int) -> list[tuple[list[SeqSlice], float]]:
    """Steps and what they seem to have taken: of one in ten the landing is noticed when the next one has landed."""
    rng = random.Random(seed)
    steps = traffic(seed, num_steps)
    seem_s = [TRUE.of(Load.of(slices)) for slices in steps]
    for number in range(1, num_steps):
        if rng.random() < 0.1:
            seem_s[number - 1] += seem_s[number] - 1e-5
            seem_s[number] = 1e-5
    return list(zip(steps, seem_s, strict=True))


def test_steps_whose_landing_is_noticed_late_do_not_count_for_more_than_others():
    """The fault: one that seemed to take 0.06 ms counted a thousand times, and no price was near what steps took."""
    steps = noticed_late(6, 1400)
    cost = StepCost()
    for slices, seconds in steps:
        cost.landed(slices, seconds)
    fitted = prices_of((Load.of(slices), seconds) for slices, seconds in steps)
    for slices in traffic(7, 100):
        load = Load.of(slices)
        assert cost.prices().of(load) == pytest.approx(TRUE.of(load), rel=0.25)
        assert fitted.of(load) == pytest.approx(TRUE.of(load), rel=0.25)
    assert cost.error < 0.4


def test_nor_do_they_at_first():
    """Before anything is expected of steps, none counts for more than one that takes what they take on average."""
    cost = StepCost()
    for num_tokens in (100, 110, 120):
        cost.landed([chunk(0, num_tokens)], TRUE.of(Load.of([chunk(0, num_tokens)])))
    cost.landed([decode(100)], TRUE.of(Load.of([decode(100)])))
    for _ in range(3):
        cost.landed([chunk(0, 100)], 1e-5)
    load = Load.of([chunk(0, 100)])
    assert cost.prices().of(load) > 0.3 * TRUE.of(load)
    first = StepCost()
    first.landed([chunk(0, 100)], 0.25)
    first.landed([chunk(0, 100)], 1e-5)
    first.landed([chunk(0, 100)], 0.25)
    first.landed([decode(100)], 0.05)
    assert first.prices().of(load) > 0.3 * TRUE.of(load)


def test_what_was_never_seen_apart_is_not_divided_by_nothing():
    """One stream with one prompt at a time: tokens, rows and keys go together, and no price is negative."""
    cost = StepCost()
    for number in range(200):
        slices = [decode(100), chunk(0, 128)] if number % 9 == 0 else [decode(100 + number)]
        cost.landed(slices, 0.1 if len(slices) == 2 else 0.02)
    prices = cost.prices()
    assert min(prices) >= 0.0
    assert prices.of(Load(1, 1, 200)) == pytest.approx(0.02, rel=0.05)
    assert prices.of(Load(129, 2, 228)) == pytest.approx(0.1, rel=0.05)


def test_nothing_is_predicted_before_there_were_prompts():
    cost = StepCost()
    for _ in range(100):
        cost.landed([decode(100)], 0.02)
    assert cost.prices() is None
    cost.landed([], 0.02)
    for _ in range(3):
        cost.landed([chunk(0, 64)], 0.2)
    assert cost.prices() is not None


def known(prices: Prices = TRUE) -> StepCost:
    cost = StepCost()
    for slices in traffic(4, 1400):
        cost.landed(slices, prices.of(Load.of(slices)))
    return cost


class Decoding:
    num_computed = 500


@pytest.mark.parametrize("target_s", [0.15, 0.3, None])
@pytest.mark.parametrize("start", [0, 1500])
def test_what_is_allowed_fills_the_target_and_not_more(target_s, start):
    cost = known()
    decoders = [Decoding()] * 10
    allowance = StreamPace(cost, target_s, 16).allowance(decoders)
    num_tokens = allowance.take(start, 10_000)
    decode_s = TRUE.of(Load(10, 10, 5000))
    seconds = TRUE.of(Load(10 + num_tokens, 11, 5000 + (start + num_tokens) * num_tokens / 128))
    assert num_tokens > 1
    # Keys that the chunk itself adds are reckoned from its beginning, so a little more may be allowed.
    assert seconds == pytest.approx(2.5 * decode_s if target_s is None else target_s, rel=0.06)
    assert allowance.take(0, 100) == 0
    assert allowance.is_spent


def test_some_prompt_tokens_are_computed_however_long_that_takes():
    allowance = StreamPace(known(), 0.001, 512).allowance([Decoding()])
    assert (allowance.take(0, 20), allowance.take(0, 20), allowance.take(0, 20)) == (20, 12, 0)


@pytest.mark.parametrize(("factor", "least"), [(4.0, 512), (2.5, 256), (1.0, 1)])
def test_without_a_target_what_is_computed_in_any_case_grows_with_what_others_may_wait(factor, least):
    """The fault: 512 tokens beside those who decode on an H200, where 2.5 times the step allowed 270."""
    cost = StepCost()
    for num_tokens in (1000, 2000, 4000):
        cost.landed([chunk(0, num_tokens)], 1.0 * num_tokens)
        cost.landed([decode(100)], 0.001)
    allowance = StreamPace(cost, None, 8192, factor).allowance([Decoding()] * 40)
    assert allowance.take(0, 10_000) == least


def test_a_step_may_take_what_nobody_notices():
    """The fault: prompts of a small model in four steps, so that who reads gets 1,000 tokens a second and not 300."""
    tiny = Prices(base=4e-4, token=2e-5, row=1e-5, key=0.0)
    allowance = StreamPace(known(tiny), None, 512).allowance([Decoding()] * 3)
    assert 400 <= allowance.take(0, 10_000) <= 500
    slow = StreamPace(known(Prices(*(100 * price for price in tiny))), None, 512).allowance([Decoding()] * 3)
    assert slow.take(0, 10_000) == pytest.approx(32, abs=4)


# Without a target: one token in a hundred may be late, where many newcomers wait for few.


@pytest.mark.parametrize(
    ("num_decoding", "num_newcomers", "is_full"),
    [(1, 1, True), (2, 1, True), (3, 1, False), (17, 15, True), (9, 4, False)],
)
def test_a_step_is_filled_where_at_least_half_as_many_come_as_decode(num_decoding, num_newcomers, is_full):
    allowance = StreamPace(known(QUICK), None, 512).allowance([Decoding()] * num_decoding, num_newcomers)
    assert (allowance.take(0, 10_000) == 10_000) is is_full
    assert allowance.is_spent is not is_full


@pytest.mark.parametrize("target_s", [0.3, 1e-6])
def test_a_target_that_was_set_is_not_exceeded_however_many_wait(target_s):
    allowance = StreamPace(known(), target_s, 512).allowance([Decoding()], 100)
    assert allowance.take(0, 10_000) < 200


def num_filled(pace: StreamPace, num_decoding: int, num_prompt: int) -> int:
    """How many steps in a row may be filled, of 1000."""
    for number in range(1000):
        if pace.allowance([Decoding()] * num_decoding, num_decoding).take(0, num_prompt) < num_prompt:
            return number
    return 1000


def test_no_more_than_one_token_in_a_hundred_is_late():
    """The fault: a burst of newcomers that goes on for ever, and streams that get a token a second."""
    cost = known(QUICK)
    pace = StreamPace(cost, None, 512)
    assert num_filled(pace, 10, 4000) == MAX_LATE // 10

    def decoded(num_rows: int) -> None:
        slices = [decode(100)] * num_rows
        cost.landed(slices, QUICK.of(Load.of(slices)))

    decoded(999)
    assert num_filled(pace, 10, 4000) == 0
    decoded(1)
    assert num_filled(pace, 10, 4000) == 1
    decoded(10_000)  # what is saved up is bounded
    assert num_filled(pace, 10, 4000) == MAX_LATE // 10


def test_a_step_that_is_not_late_costs_nothing():
    assert num_filled(StreamPace(known(QUICK), None, 512), 8, 10) == 1000


def test_more_than_may_be_late_are_not_made_late_at_once():
    assert num_filled(StreamPace(known(QUICK), None, 512), int(MAX_LATE) + 1, 4000) == 0


@pytest.mark.parametrize(("budget", "is_late"), [(90, True), (110, False)])
def test_nobody_waits_for_a_full_step_that_takes_longer_than_is_hardly_noticed(budget, is_late):
    """The fault: on a CPU those who decoded waited for three seconds, while others' prompts filled a step."""
    decode_s = TRUE.of(Load(1, 1, 500))
    assert (decode_s + budget * TRUE.token < LATE_S) is is_late
    allowance = StreamPace(known(), None, budget).allowance([Decoding()], 8)
    assert (allowance.take(0, 10_000) == 10_000) is is_late


def test_without_those_who_decode_there_is_no_limit_and_none_at_target_0():
    assert StreamPace(known(), None, 16).allowance([]) is None
    assert StreamPace(known(), 0.0, 16).allowance([Decoding()]) is None


# With graphs, whose sizes steps fill.

SIZES = GraphSizes((0, 8, 32, 64, 128), (64, 128, 192, 256, 384, 512), num_prompts=16, cheap_tokens=256)
H200 = Prices(base=1.6e-3, token=2.25e-5, row=0.0, key=0.0)


def with_graphs(prices: Prices = H200) -> StepCost:
    cost = StepCost(SIZES)
    for num_tokens in (49, 113, 177, 241, 369, 497) * 20:
        slices = [*[decode(600)] * 42, chunk(0, num_tokens)]
        cost.landed(slices, prices.base + prices.token * (64 + num_tokens + 15))
        cost.landed([decode(600)] * 42, prices.base + prices.token * 42)
    return cost


def test_a_step_costs_what_is_computed_with_padding():
    assert Load.of([*[decode(9)] * 42, chunk(0, 300)], SIZES).tokens == 342  # no graph holds it but by too much of it
    assert Load.of([*[decode(9)] * 42, chunk(0, 330)], SIZES).tokens == 64 + 384
    assert Load.of([decode(9)] * 42, SIZES).tokens == 42
    drafted = SeqSlice(SeqId(1), Row(1), 8, 3, (1, 2, 3), (), num_samples=3)
    assert Load.of([decode(9), drafted], SIZES).tokens == 4
    cost = with_graphs()
    assert cost.prices().token == pytest.approx(H200.token, rel=0.02)
    assert cost.error < 0.01


def taken(cost: StepCost, factor: float, *prompts: int, num_newcomers: int | None = None) -> list[int]:
    """Of prompts of so many tokens, beside 42 sequences that decode: how much of each a step computes."""
    pace = StreamPace(cost, None, 512, factor)
    # The first twenty tokens that are late: with 42 rows none of them is.
    allowance = pace.allowance([Decoding()] * 42, len(prompts) if num_newcomers is None else num_newcomers)
    return [0 if allowance.is_spent else allowance.take(0, num_prompt) for num_prompt in prompts]


def test_prompts_beside_streams_fill_graphs():
    cost, decode_s = with_graphs(), H200.base + 42 * H200.token
    factor = 14e-3 / decode_s  # 14 ms: 551 tokens with padding, of 576 that the largest graph would compute
    assert taken(cost, factor, 2000) == [369]
    assert taken(cost, factor, 200) == [177]
    assert taken(cost, factor, 150) == [150]
    assert taken(cost, factor, 150, 150, 150) == [150, 150, 71]  # of three prompts thirteen places are left over
    assert taken(cost, factor, 150, 150, num_newcomers=5) == [150, 150]
    assert taken(cost, 15e-3 / decode_s, 2000, 10) == [497, 0]
    assert taken(cost, 20e-3 / decode_s, 2000) == [pytest.approx(775, abs=10)]  # longer than its launches take


def test_a_step_of_which_it_is_known_badly_what_it_takes_is_kept_below():
    cost, decode_s = with_graphs(), H200.base + 42 * H200.token
    assert taken(cost, 15e-3 / decode_s, 2000) == [497]
    cost.error = 0.1
    assert taken(cost, 15e-3 / decode_s, 2000) == [369]


# On a virtual clock, where steps take what the simulation says.

BUSY = [
    *(Arrival(0.01 * i, "reader", 20, 400) for i in range(8)),
    *(Arrival(0.5 + 0.2 * i, "writer", 1500, 4) for i in range(20)),
]


class Watch(Simulation):
    """How long each step took in which somebody decoded, and the steps from arrival to first token of prompts."""

    def __init__(self, *args: object, **limits: object) -> None:
        super().__init__(*args, **limits)
        self.mixed_s: list[float] = []

    def _step(self, plan):
        before = self.now
        decodes = [piece for piece in plan.slices if not piece.token_ids]
        super()._step(plan)
        if decodes and len(decodes) < len(plan.slices):
            self.mixed_s.append(self.now - before)


def longest(target_itl_s: float | None, **limits: object) -> tuple[Watch, float]:
    watch = Watch(BUSY, target_itl_s=target_itl_s, long_prefill_token_threshold=0, **limits)
    watch.run()
    assert len(watch.outcome.finished) == len(BUSY)
    late = watch.mixed_s[10:]  # the first are learned from
    return watch, max(late)


def test_streams_are_not_held_up_by_prompts():
    _, unbounded_s = longest(0.0)
    watch, auto_s = longest(None)
    _, set_s = longest(0.015)
    assert unbounded_s >= STEP_S + 500 * TOKEN_S
    assert auto_s <= 2.6 * (STEP_S + 9 * TOKEN_S)
    assert set_s <= 0.0155
    assert watch.scheduler.statistics().step_time_error < 0.05


def test_a_prompt_gets_on_however_short_the_target_is():
    """At a target that no step meets, a sixteenth of a step's 512 tokens is computed of prompts in each."""
    watch = Watch([*BUSY[:8], Arrival(2.0, "writer", 1500, 1)], target_itl_s=1e-6, max_num_batched_tokens=512)
    # Steps with prompts to learn from, before anything else comes.
    for _ in range(5):
        watch.scheduler.step_cost.landed([chunk(0, 100)], STEP_S + 100 * TOKEN_S)
        for _ in range(8):
            watch.scheduler.step_cost.landed([decode(10)], STEP_S + TOKEN_S)
    watch.run()
    [waited_s] = watch.outcome.first_token_s["writer"]
    num_steps = -(-1500 // (512 // 16)) + 1
    assert waited_s <= num_steps * (STEP_S + (8 + 32) * TOKEN_S)
    assert waited_s > (num_steps - 10) * STEP_S


def test_nobody_waits_longer_for_it_where_nobody_decodes():
    alone = [Arrival(float(i), "writer", 1500, 1) for i in range(4)]
    waits = [simulate(alone, target_itl_s=target).first_token_s["writer"] for target in (0.0, None)]
    assert waits[0] == waits[1]


WAVES = [Arrival(2.0 * wave + 4e-4 * i, "wave", 128, 64) for wave in range(5) for i in range(32)]


@pytest.mark.parametrize(("target_itl_s", "num_late"), [(None, 2 * 5), (0.02, 2)])
def test_a_wave_of_prompts_is_computed_while_next_to_nobody_decodes(target_itl_s, num_late):
    """Of 32 streams: the first comes alone, 16 and 15 fill a step each. Piece by piece all would wait for others.

    Where a target is set, it is only exceeded before anything is known of the costs, in the first wave.
    """
    watch = Watch(
        WAVES, target_itl_s=target_itl_s, max_num_batched_tokens=2048, long_prefill_token_threshold=0, itl_factor=4.0
    )
    watch.run()
    assert sum(took_s > 0.05 for took_s in watch.mixed_s) == num_late
    assert (len(watch.mixed_s) == num_late) is (target_itl_s is None)


def test_streams_keep_their_pace_beside_bursts_that_do_not_end():
    """Ten newcomers at once, again and again, beside four who decode: some steps are filled, and soon no more."""
    bursts = [Arrival(0.5 + 0.4 * (i // 10), "burst", 200, 2) for i in range(400)]
    watch = Watch(
        [*(Arrival(0.0, "reader", 20, 3000) for _ in range(4)), *bursts],
        target_itl_s=None,
        max_num_batched_tokens=2048,
        long_prefill_token_threshold=0,
    )
    watch.run()
    assert len(watch.outcome.finished) == 404
    late = [took_s for took_s in watch.mixed_s if took_s > 2.5 * (STEP_S + 20 * TOKEN_S)]
    assert 4 <= len(late) <= (MAX_LATE + 0.01 * watch.outcome.num_tokens) / 4
    assert len(late) < len(watch.mixed_s) / 4


# A step's budget stretches over a small remainder.


@pytest.mark.parametrize(
    ("num_prompt", "steps"),
    [(64, [64]), (66, [66]), (67, [64, 3]), (130, [64, 66]), (194, [64, 64, 66])],
)
def test_the_last_few_tokens_of_a_prompt_do_not_take_a_step_of_their_own(num_prompt, steps):
    loop = SyncLoop(max_num_batched_tokens=64, num_blocks=200, max_model_len=400)
    loop.add(request("a", tuple(n % 3 for n in range(num_prompt)), max_tokens=1))
    loop.drain()
    loop.compare()
    assert [plan.num_tokens for plan in loop.plans] == steps


def test_a_limit_for_one_prompt_does_not_stretch():
    loop = SyncLoop(max_num_batched_tokens=128, long_prefill_token_threshold=64, num_blocks=200, max_model_len=400)
    loop.add(request("a", tuple(n % 3 for n in range(66)), max_tokens=1))
    loop.drain()
    assert [plan.num_tokens for plan in loop.plans] == [64, 2]

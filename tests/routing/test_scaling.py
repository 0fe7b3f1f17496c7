"""How many replicas are wanted: as many as there is work for, within bounds, without going up and down."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.routing import ReplicaLoad, ScalingOptions, ScalingState, wanted_replicas

OPTIONS = ScalingOptions(min_replicas=1, max_replicas=20, up_after_s=0.0, down_after_s=60.0)
AMOUNTS = st.floats(0, 2**53)
LOADS = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        ReplicaLoad,
        waiting_tokens=AMOUNTS,
        tokens_per_s=st.none() | st.floats(0.001, 1e9),
        num_computed_tokens=AMOUNTS,
        num_requests=AMOUNTS,
    ),
)


class Fleet:
    """Replicas of 1000 tokens a second that share what arrives, looked at every 10 s; new ones take a look to start."""

    def __init__(self, options: ScalingOptions = OPTIONS, num: int = 1) -> None:
        self.options = options
        self.num = num
        self.queue = self.computed = self.now = 0.0
        self.state = ScalingState()

    def look(self, tokens_per_s: float, seconds: float = 10.0) -> int:
        """So much arrives each second for so long; then it is decided."""
        self.now += seconds
        arrived = self.queue + tokens_per_s * seconds
        done = min(arrived, self.num * 1000 * seconds)
        self.queue, self.computed = arrived - done, self.computed + done / max(self.num, 1)
        load = ReplicaLoad(
            waiting_tokens=self.queue / max(self.num, 1),
            tokens_per_s=1000.0,
            num_computed_tokens=self.computed,
            num_requests=float(arrived > 0),
        )
        loads = {str(place): load for place in range(self.num)}
        self.num, self.state = wanted_replicas(loads, self.num, self.state, self.options, self.now)
        return self.num


@pytest.mark.parametrize(("num_waiting", "wanted"), [(1000.0, 1), (1250.0, 1), (1251.0, 2)])
def test_a_share_more_than_there_are_is_tolerated_and_that_share_itself(num_waiting: float, wanted: int):
    options = msgspec.structs.replace(OPTIONS, tolerance=0.25, target_wait_s=10.0)
    loads = {
        "a": ReplicaLoad(waiting_tokens=num_waiting, tokens_per_s=100.0, num_computed_tokens=0.0, num_requests=1.0)
    }
    assert wanted_replicas(loads, 1, ScalingState(), options, 0.0)[0] == wanted


@given(LOADS, st.integers(0, 50), st.lists(st.floats(0, 2e9), min_size=1, max_size=8), st.integers(0, 3))
def test_any_figures_have_an_answer_within_the_bounds(
    loads: dict[str, ReplicaLoad], num: int, at: list[float], least: int
):
    options = ScalingOptions(min_replicas=least, max_replicas=9, up_after_s=5.0)
    state = ScalingState()
    for now in at:
        num, state = wanted_replicas(loads, num, state, options, now)
        assert least <= num <= 9
        assert ScalingState.from_dict(state.to_dict()) == state


def test_the_state_is_bounded_and_what_is_none_is_a_new_one():
    state, options = ScalingState(), ScalingOptions(max_replicas=3, down_after_s=86_400)
    for second in range(1000):
        _, state = wanted_replicas({"a": ReplicaLoad()}, 1, state, options, float(second))
    assert len(state.history) <= 256
    assert ScalingState.from_dict(None) == ScalingState.from_dict({"at": "noon"}) == ScalingState()


def test_steady_work_gets_what_it_needs_and_no_more():
    fleet = Fleet()
    nums = [fleet.look(3500) for _ in range(60)]
    assert nums[-30:] == [5] * 30, "3500 tokens a second, of which a replica shall do 700"
    assert fleet.queue == 0


def test_what_piles_up_is_worked_off_and_replicas_go_when_it_is_quiet_for_long():
    fleet = Fleet(num=2)
    calm = [fleet.look(1000) for _ in range(20)]
    burst = [fleet.look(8000) for _ in range(6)]
    after = [fleet.look(1000) for _ in range(30)]
    assert calm[-1] == 2
    assert max(burst) >= 8
    assert burst == sorted(burst), "it only grows while more is wanted"
    assert after[-1] == 2
    assert after[:3] == [max(burst)] * 3, "down after a minute in which fewer were wanted"
    assert after == sorted(after, reverse=True), "and never up again"


def test_noise_moves_nothing():
    fleet = Fleet()
    for _ in range(30):
        fleet.look(3500)
    assert len({fleet.look(3500 + (-1) ** number * 300) for number in range(60)}) == 1


def test_up_waits_as_long_as_it_is_told():
    fleet = Fleet(ScalingOptions(max_replicas=9, up_after_s=30.0))
    assert [fleet.look(5000) for _ in range(5)][:3] == [1, 1, 1]
    assert fleet.num > 1


def test_bursts_that_are_over_before_that_bring_nobody():
    fleet = Fleet(msgspec.structs.replace(OPTIONS, up_after_s=30.0, down_after_s=300.0), num=3)
    nums = [fleet.look(tokens_per_s) for tokens_per_s in (6000, 100, 100) * 8]
    assert nums == [3] * 24


def test_it_grows_by_a_factor_at_a_time():
    fleet = Fleet()
    assert fleet.look(1e6) == fleet.look(1e6, 0.1) == 2
    assert fleet.look(1e6) == 4


def test_none_is_enough_for_nobody_and_one_comes_when_somebody_asks():
    options = ScalingOptions(min_replicas=0, max_replicas=4, up_after_s=0.0, down_after_s=20.0)
    idle = {"a": ReplicaLoad(tokens_per_s=1000.0)}
    num, state = 1, ScalingState()
    for look in range(4):
        num, state = wanted_replicas(idle, num, state, options, 10.0 * look)
    assert num == 0
    num, state = wanted_replicas({}, 0, state, options, 50.0)
    assert num == 0
    num, state = wanted_replicas({}, 0, state, options, 60.0, num_queued=2)
    assert num == 1


def test_a_speed_that_nobody_has_measured_changes_nothing():
    busy = {"a": ReplicaLoad(waiting_tokens=1e6, num_requests=3)}
    assert wanted_replicas(busy, 3, ScalingState(), OPTIONS, 0.0)[0] == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_replicas", -1), ("max_replicas", 0), ("target_utilisation", 0), ("tolerance", 2), ("max_step_up", 1)],
)
def test_options_out_of_bounds_are_named(field: str, value: float):
    with pytest.raises(ValueError, match=f"{field} must be from"):
        ScalingOptions(**{field: value})


def test_fewer_at_most_than_at_least_is_an_error():
    with pytest.raises(ValueError, match="max_replicas must be from 3"):
        msgspec.structs.replace(OPTIONS, min_replicas=3, max_replicas=2)

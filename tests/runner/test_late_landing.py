"""Steps of which is told late: when the next one's kernels begin, and in every case before anything waits for it."""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from aserve.core.plan import StepPlan, StepResult
from aserve.kernels.cpu import CpuOps
from aserve.runner.device import CpuDevice
from aserve.runner.failures import SkippedStepError
from aserve.runner.runner import ModelRunner
from aserve.runner.threads import StepThreads
from tests.kernels.cases import native_ops
from tests.runner.toy import BOMB, ToyError, ToyLM, chunk, continuation, fed, init, toy_runner, until

pytestmark = pytest.mark.torch

PROMPT = [5, 6, 7]
PREFILL = StepPlan(0, (chunk(0, 0, PROMPT, 1, 2, 3),), (init(0),))


class Watched(CpuDevice):
    """Notes, when a step is made ready, which of the steps are told."""

    def __init__(self) -> None:
        self.flights: list[Any] = []
        self.told: list[list[bool]] = []

    def stepping(self) -> AbstractContextManager[Any]:
        self.told.append(told(self.flights))
        return nullcontext()


def told(flights: list[Any]) -> list[bool]:
    return [flight._landed.done() for flight in flights]


def decoding(position: int) -> StepPlan:
    return StepPlan(position, (fed(0, position),))


def watched(monkeypatch: pytest.MonkeyPatch, *plans: StepPlan, ops: Any = None) -> tuple[ModelRunner, Watched, list]:
    """A runner that has been given all of these before it begins; and which steps are told as each forward begins."""
    device, forwards = Watched(), []
    runner = toy_runner(device=device, ops=native_ops() if ops is None else ops)
    gate = threading.Event()
    runner._worker.submit(gate.wait)
    forward = ToyLM.forward

    def noting(*arguments: Any) -> Any:
        forwards.append(told(device.flights))
        return forward(*arguments)

    monkeypatch.setattr(ToyLM, "forward", noting)
    device.told.clear()
    device.flights += [runner.launch(plan) for plan in plans]
    gate.set()
    return runner, device, forwards


def test_a_step_is_told_when_the_next_ones_kernels_begin_and_not_before(monkeypatch):
    runner, device, forwards = watched(monkeypatch, PREFILL, decoding(3), decoding(4))
    runner._worker.submit(lambda: None).result()
    begun = [[True] * step + [False] * (3 - step) for step in range(3)]
    assert forwards == [begun[0], *begun], "a made-up step comes first, of which the calls are captured"
    assert device.told == [begun[0], *begun[:2]]
    assert told(device.flights) == [True] * 3, "nothing stands behind the last one"
    tokens = [flight._landed.result().token_ids[0] for flight in device.flights]
    assert tokens == continuation(PROMPT, 3)
    runner.close()


def test_a_step_is_told_at_once_where_others_kernels_compute(monkeypatch):
    runner, device, _ = watched(monkeypatch, PREFILL, decoding(3), decoding(4), ops=CpuOps())
    runner._worker.submit(lambda: None).result()
    assert device.told == [[True] * step + [False] * (3 - step) for step in range(3)]
    runner.close()


def test_a_step_with_much_to_make_ready_does_not_keep_the_last_ones_tokens_waiting(monkeypatch):
    other = StepPlan(4, (chunk(1, 0, PROMPT, 4, 5),), (init(1),))
    runner, device, _ = watched(monkeypatch, PREFILL, decoding(3), other)
    runner._worker.submit(lambda: None).result()
    assert device.told[-1] == [True, True, False]
    runner.close()


def test_a_step_is_told_before_the_next_one_that_fails(monkeypatch):
    """Also where that one fails before its kernels."""
    bad = StepPlan(4, (chunk(0, 4, [BOMB]),))
    runner, device, _ = watched(monkeypatch, PREFILL, decoding(3), bad, decoding(5))
    ends: list[int] = []
    for number, flight in enumerate(device.flights):
        flight._landed.add_done_callback(lambda _, number=number: ends.append(number))
    runner._worker.submit(lambda: None).result()
    assert ends == [0, 1, 2, 3]
    kinds = [type(flight._landed.result()) for flight in device.flights]
    assert kinds == [StepResult, StepResult, ToyError, SkippedStepError]
    runner.close()


def test_the_last_step_is_told_when_the_runner_is_closed_meanwhile(monkeypatch):
    """Whoever closes counts as a step that follows."""
    runner, *_ = watched(monkeypatch)
    gate = threading.Event()
    runner._worker.submit(gate.wait)
    flight = runner.launch(PREFILL)
    closing = threading.Thread(target=runner.close)
    closing.start()
    until(lambda: runner._num_submitted == 2)
    gate.set()
    closing.join()
    assert told([flight]) == [True]


def test_threads_give_way_to_whoever_is_told_at_once_and_not_while_the_next_step_is_there(monkeypatch):
    ways: list[int] = []
    monkeypatch.setattr(StepThreads, "give_way", lambda _: ways.append(1))
    runner, device, _ = watched(monkeypatch, PREFILL, decoding(3), decoding(4))
    until(lambda: all(told(device.flights)))
    runner.close()
    assert ways == [1]

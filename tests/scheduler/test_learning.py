"""Which steps the scheduler learns from what they take, and for how many others each stands."""

import pytest

from tests.scheduler.sync_loop import SyncLoop, request


def learned(loop: SyncLoop, took_s: float, monkeypatch: pytest.MonkeyPatch, *, num_steps: int, depth: int = 1):
    """By step that was learned from, of so many steps: the seconds, and how many steps it stood for."""
    found = {}
    monkeypatch.setattr(
        loop.scheduler.step_cost,
        "landed",
        lambda _slices, seconds, num_steps: found.update({landing.step_id: (seconds, num_steps)}),
    )
    flying = []
    for step_id in range(num_steps):
        if step_id == 20:
            loop.add(request("later", (1, 1), max_tokens=90))
        if (plan := loop.scheduler.plan(0.0)) is not None:
            flying.append((plan, loop._kv.run(plan)))
        if len(flying) == depth:
            landing, result = flying.pop(0)
            loop.scheduler.commit(result, took_s)
    return found


def decoding() -> SyncLoop:
    loop = SyncLoop(num_blocks=150)
    loop.add(request("a", (0, 1), max_tokens=90))
    return loop


@pytest.mark.parametrize(
    ("took_s", "num_by_step"),
    [
        (0.01, {0: 1, 1: 1, 9: 8, 17: 8, 20: 3, 21: 1, 29: 8}),
        (0.001, {0: 1, 17: 17, 20: 3, 37: 17}),  # too short to learn from each, unless it has a prompt
    ],
)
def test_steps_that_only_decode_are_learned_from_now_and_then(took_s, num_by_step, monkeypatch):
    found = learned(decoding(), took_s, monkeypatch, num_steps=38)
    assert {step_id: num for step_id, (_, num) in found.items() if step_id < 37 or took_s < 0.01} == num_by_step
    assert {seconds for seconds, _ in found.values()} == {took_s}

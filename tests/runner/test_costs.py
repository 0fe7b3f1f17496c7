"""What start-up measures of memory that is short."""

import pytest

from aserve.runner.costs import measure_costs, measure_drafting
from tests.runner.toy import toy_runner

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("max_model_len", "num_host_blocks"), [(2, 1), (64, 40)])
def test_costs_are_measured_on_the_null_block(max_model_len, num_host_blocks):
    runner = toy_runner(num_blocks=1, num_host_blocks=num_host_blocks)
    costs = measure_costs(runner.run, max_model_len=max_model_len, block_size=4, num_host_blocks=num_host_blocks)
    runner.close()
    assert 0 <= costs.recompute_s < 1
    assert 0 < costs.swap_s < 1


def test_costs_are_shares_of_a_step():
    now_s = 0.0

    def run(plan):
        nonlocal now_s
        moves = plan.block_ops
        now_s += 0.001 + 0.002 * plan.num_tokens if moves is None else 0.004 * 2 * len(moves.swap_ins)

    costs = measure_costs(run, max_model_len=1000, block_size=16, num_host_blocks=5, clock=lambda: now_s)
    assert costs.recompute_s == pytest.approx(0.002)
    assert costs.swap_s == pytest.approx(0.004)


@pytest.mark.parametrize(("num_rows", "token_s"), [(1, 0.0), (4, 0.003), (256, 0.003)])
def test_what_a_draft_models_step_takes_is_told_from_the_step_that_it_rides_in(num_rows, token_s):
    """A single run that is slow for another reason does not count."""
    now_s, num_runs = 0.0, 0

    def run(plan):
        nonlocal now_s, num_runs
        num_runs += 1
        now_s += 7.0 if num_runs == 3 else 0.0
        assert len(plan.drafting) in (0, 5)
        assert plan.num_tokens == 1
        now_s += 0.5 + sum(0.002 + 0.003 * step.num_tokens for step in plan.drafting)

    seconds = measure_drafting(run, num_rows=num_rows, num_drafts=5, clock=lambda: now_s)
    assert seconds.token == pytest.approx(token_s)
    assert seconds.base + seconds.token == pytest.approx(0.005)

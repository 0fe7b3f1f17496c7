"""What start-up measures of memory that is short."""

import pytest

from aserve.runner.costs import measure_costs
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

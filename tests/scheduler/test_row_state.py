"""A runner whose rows keep more than tokens: after a step that failed, a prompt is computed from its beginning."""

import msgspec
import pytest

from aserve.core.config import EngineConfig
from aserve.core.plan import StepResult
from aserve.scheduling import make_scheduler
from tests.scheduler.sync_loop import request

CHUNK = 8


@pytest.mark.parametrize(
    ("pools", "caches", "per_token", "start"),
    [
        (True, False, False, 0),
        (True, True, False, CHUNK),
        (True, True, True, 0),
        (False, False, False, CHUNK),
    ],
)
def test_where_a_prompt_goes_on_after_a_step_that_failed(pools, caches, per_token, start):
    """Catches a vector in which the first chunks of its input are missing, or counted twice.

    Where prefixes are cached, a vector is made of the last position alone, and rows keep nothing but for those each of
    whose tokens has a vector.
    """
    config = EngineConfig(
        block_size=4,
        num_blocks=32,
        max_num_seqs=4,
        max_num_batched_tokens=CHUNK,
        max_model_len=64,
        watermark=0.0,
        enable_prefix_caching=caches,
        pools=pools,
    )
    scheduler = make_scheduler(config)
    scheduler.add(msgspec.structs.replace(request("a", tuple(range(3 * CHUNK))), per_token=per_token))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    scheduler.commit(StepResult(first.step_id, ()))
    assert scheduler.revert(second.step_id) is None
    plan = scheduler.plan(0.0)
    assert [(piece.start, piece.num_tokens) for piece in plan.slices] == [(start, CHUNK)]
    assert [init.seq_id for init in plan.inits] == [plan.slices[0].seq_id]
    scheduler.check()

"""The free queue, beside a plain list."""

from hypothesis import given
from hypothesis import strategies as st

from aserve.core.ids import BlockId
from aserve.kv_cache.free_queue import FreeQueue

NUM_BLOCKS = 9


def test_it_begins_with_all_but_the_null_block():
    assert [*FreeQueue(5)] == [1, 2, 3, 4]


@given(st.lists(st.tuples(st.sampled_from(("pop", "remove", "append", "prepend")), st.integers(0, 4), st.randoms())))
def test_it_holds_what_a_list_would(steps):
    queue, expected = FreeQueue(NUM_BLOCKS), [*range(1, NUM_BLOCKS)]
    for name, num, random in steps:
        outside = [block for block in range(1, NUM_BLOCKS) if block not in expected]
        if name == "pop":
            num = min(num, len(expected))
            assert queue.pop(num) == tuple(expected[:num])
            del expected[:num]
        elif name == "remove":
            removed = random.sample(expected, min(num, len(expected)))
            queue.remove(removed)
            expected = [block for block in expected if block not in removed]
        else:
            added = list(map(BlockId, random.sample(outside, min(num, len(outside)))))
            (queue.append if name == "append" else queue.prepend)(added)
            expected = expected + added if name == "append" else added + expected
        assert [*queue] == expected
        assert len(queue) == len(expected)
        assert _backwards(queue) == expected[::-1]


def _backwards(queue: FreeQueue) -> list[BlockId]:
    """The queue along its other links."""
    blocks = []
    block_id = queue._previous[0]
    while block_id:
        blocks.append(block_id)
        block_id = queue._previous[block_id]
    return blocks

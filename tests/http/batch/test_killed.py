"""Batches of a process that is killed: what was acknowledged is there, and every line is answered exactly once."""

import json
import random
import zlib

import pytest

from aserve.http import AppOptions, create_app
from tests.engines import scripted_engine
from tests.stores.killing import said_before_kill


@pytest.mark.parametrize("num_kills", [2, pytest.param(200, marks=[pytest.mark.thorough, pytest.mark.timeout(3600)])])
async def test_no_line_is_lost_or_answered_twice_by_kill_9(tmp_path, num_kills):
    """Catches a batch that is forgotten, a line that is run anew though its answer was kept, or is told twice."""
    path, chance = str(tmp_path / "a.db"), random.Random(1)
    batches, answered = {}, {}
    for _ in range(num_kills):
        for words in map(
            str.split, said_before_kill("tests.http.batch.batcher", path, after_s=chance.uniform(0.0, 0.1))
        ):
            if words[0] == "batch":
                batches[words[1]] = range(int(words[2]), int(words[2]) + int(words[3]))
            else:
                answered[words[1], int(words[2])] = int(words[3])
    async with scripted_engine() as engine:
        app = create_app(engine, options=AppOptions(batch_store=path))
        store, states = app.state.batches.store, app.state.batches
        try:
            await states.resume()
            await states.wait()
            told = {state["id"]: state for state in await states.told("")}
            contents = {id: await contents_of(store, told[id]) for id in batches}
        finally:
            store.close()
    assert len(batches) >= num_kills
    assert len(answered) >= num_kills
    for id, numbers in batches.items():
        good, failed = contents[id]
        assert told[id]["status"] == "completed"
        assert told[id]["request_counts"] == {"total": len(numbers), "completed": len(good), "failed": len(failed)}
        assert [json.loads(line)["custom_id"] for line in good] == [str(n) for n in numbers if n % 3]
        assert [json.loads(line)["custom_id"] for line in failed] == [str(n) for n in numbers if not n % 3]
    for (id, number), crc in answered.items():
        if id in batches:  # of others nobody was told
            good, failed = contents[id]
            custom_id = str(batches[id][number])
            [line] = [line for line in (*good, *failed) if json.loads(line)["custom_id"] == custom_id]
            assert zlib.crc32(line) == crc, "the answer that was kept is the one that is told"


async def contents_of(store, state):
    """The lines of a batch's output file and of its error file."""
    ids = state["output_file_id"], state["error_file_id"]
    return [[] if id is None else (await store.content(id)).splitlines() for id in ids]

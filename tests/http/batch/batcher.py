"""A server that makes batches and says what it has acknowledged, until it is killed: `python -m ... FILE`.

    batch ID FIRST NUM      a batch of the lines FIRST to FIRST + NUM was created
    line ID NUMBER CRC      what that line came to is kept

It first goes on with what an earlier one has left.
"""

import asyncio
import json
import sys
import zlib

from aserve.http import AppOptions, create_app
from aserve.http.batch import batches as of_batches
from aserve.http.batch.files import new_file
from aserve.stores.batches import BatchStore
from tests.engines import scripted_engine

URL = "/v1/chat/completions"
NUM_UNDER_WAY = 3


def content(first: int, num: int) -> bytes:
    """An input file. Every third line is answered by an error."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": URL, "body": body | {"n": -1} if number % 3 == 0 else body}
        for number in range(first, first + num)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def say(*words: object) -> None:
    """A line."""
    print(*words, flush=True)


async def main(path: str) -> None:
    """A few batches at a time, each of some lines."""
    add_result = BatchStore.add_result

    async def add_and_say(store: BatchStore, id: str, line: int, content: bytes, *, is_error: bool) -> None:
        await add_result(store, id, line, content, is_error=is_error)
        say("line", id, line, zlib.crc32(content))

    BatchStore.add_result = add_and_say
    of_batches.MAX_DEATHS = sys.maxsize  # no line is to blame for a kill
    async with scripted_engine() as engine:
        batches = create_app(engine, options=AppOptions(batch_store=path)).state.batches
        await batches.resume()
        first = 0
        while True:
            while len(batches._tasks) >= NUM_UNDER_WAY:  # noqa: ASYNC110  batches tell nobody of their end
                await asyncio.sleep(0.001)
            num = first % 5 + 1
            file = new_file("", f"{first}.jsonl", "batch", 0)
            await batches.store.add_file(file, content(first, num))
            state = await batches.create("", URL, file.id, None)
            say("batch", state["id"], first, num)
            first += num


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

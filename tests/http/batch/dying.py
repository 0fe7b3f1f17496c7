"""A server that dies of a line of a batch: `python -m ... FILE`. Says what it runs, and when all has ended.

Its first process makes two batches, one of them with the line. It goes on with what an earlier one has left.
"""

import asyncio
import json
import os
import signal
import sys

from aserve.http import AppOptions, create_app
from aserve.http.batch.files import new_file
from aserve.http.batch.lines import LineRunner
from tests.engines import scripted_engine
from tests.http.batch.batcher import URL, say

BATCHES = ("a", "b", "poison", "c", "d", "e", "f", "g", "h"), ("i", "j", "k")


async def main(path: str) -> None:
    """Until all batches have ended, if the process lives as long."""
    run = LineRunner.run

    async def run_or_die(runner: LineRunner, line, *given):
        say("run", line.custom_id)
        if line.custom_id == "poison":
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.01)
        return await run(runner, line, *given)

    LineRunner.run = run_or_die
    async with scripted_engine() as engine:
        batches = create_app(engine, options=AppOptions(batch_store=path)).state.batches
        await batches.resume()
        if not await batches.told(""):
            for names in BATCHES:
                lines = [{"custom_id": name, "method": "POST", "url": URL} for name in names]
                body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
                content = b"".join(json.dumps(line | {"body": body}).encode() + b"\n" for line in lines)
                file = new_file("", "in.jsonl", "batch", 0)
                await batches.store.add_file(file, content)
                await batches.create("", URL, file.id, None)
        await batches.wait()
        for state in await batches.told(""):
            for field in ("output_file_id", "error_file_id"):
                for told in (await batches.store.content(state[field])).splitlines() if state[field] else ():
                    say(field, state["status"], told.decode())
        batches.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

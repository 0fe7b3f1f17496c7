"""Embed the engine in an asyncio application: no server, no process, no thread of yours to manage."""

import asyncio

from aserve import AsyncEngine, SamplingParams


async def main() -> None:
    async with AsyncEngine("demo") as engine:
        greedy = SamplingParams(temperature=0.0, max_tokens=64)

        # As it grows:
        async for delta in engine.chat([{"role": "user", "content": "What is aserve?"}], greedy):
            print(delta.text, end="", flush=True)
        print()

        # Whole, and several at once: they share every step of the engine.
        questions = ("What is 7 + 5?", "What is paged attention?")
        conversations = [[{"role": "user", "content": text}] for text in questions]
        for completion in await asyncio.gather(*(engine.complete_chat(each, greedy) for each in conversations)):
            print(completion.text)

        # Under a name, by which anybody may end it:
        num_tokens = 0
        async for delta in engine.generate("Once upon a time", request_id="story", timeout_s=60):
            print(delta.text, end="", flush=True)
            num_tokens += len(delta.token_ids)
            if num_tokens >= 20:
                engine.abort("story")
        print(f" ({delta.finish_reason}, {delta.timings})")


asyncio.run(main())

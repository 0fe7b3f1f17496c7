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
        prompts = [await engine.encode_chat([{"role": "user", "content": text}]) for text in questions]
        for completion in await asyncio.gather(*(engine.complete(prompt, greedy) for prompt in prompts)):
            print(completion.text)


asyncio.run(main())

"""Records the scenes of the inspector's guided tour: the real engine with the demonstration model, and captions.

A scene is what requests make of an engine of some size, as the feed tells it. A caption belongs to the first record,
from the one before it on, that is as it says: if none is, recording fails, so that no caption tells what is not there.
Written to aserve/http/pages/static/inspect/scenes/ (or --folder), where the page finds them.

    python scripts/record_scenes.py
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from aserve.build import loader, make_options
from aserve.core.params import BeamParams, SamplingParams
from aserve.engine import Engine
from aserve.http.inspector import VERSION, Feed
from aserve.observe.records import at_length

FOLDER: Final = Path(__file__).parents[1] / "aserve/http/pages/static/inspect/scenes"
BLOCK_BYTES: Final = 16 * 1024
"""Of a block of 16 positions of the demonstration model."""
BEGINS_US: Final = 1_000_000
"""When scenes begin, on their own clock."""
STORY = "Once upon a time there was a small house on a hill above the sea, and in it lived a man who built ships. "
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TOLD = (
    "Many years ago there lived a young bird called Sky in a little village. More than anything, Sky wanted to find "
    "a friend. So Sky"
)
SAID = "aserve serves large language models from one Python process with one asyncio event loop, over the OpenAI API."

Record = dict[str, Any]
Condition = Callable[[Record], bool]


@dataclass(frozen=True)
class Scene:
    """options: of the engine. play: asks for what is to be seen. captions: what a record is like, and what to say."""

    name: str
    title: str
    options: dict[str, Any]
    play: Callable[[Engine], Awaitable[None]]
    captions: Sequence[tuple[Condition, str]]


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


async def ask(engine: Engine, prompt: str, params: SamplingParams, *, after: asyncio.Event | None = None) -> None:
    """Read an answer to its end. after: is set when it has begun."""
    async with engine.open(prompt, params) as mailbox:
        async for _ in mailbox:
            if after is not None:
                after.set()


# What is played.


async def long_prompt(engine: Engine) -> None:
    begun = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(engine, "The sea", greedy(16), after=begun))
        await begun.wait()
        group.create_task(ask(engine, STORY * 7, greedy(6)))


async def same_beginning(engine: Engine) -> None:
    await ask(engine, STORY * 3 + "What was his name?", greedy(4))
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(engine, STORY * 3 + "How old was he?", greedy(5)))
        group.create_task(ask(engine, STORY * 3 + "Where did he go?", greedy(8)))


async def beams(engine: Engine) -> None:
    await ask(engine, STORY, SamplingParams(temperature=0.0, max_tokens=18, n=3, beam=BeamParams(width=3)))


async def too_much(engine: Engine) -> None:
    begun = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(engine, STORY * 2, greedy(20), after=begun))
        await begun.wait()
        group.create_task(ask(engine, "A lighthouse is " + STORY, greedy(14)))


async def quotes(engine: Engine) -> None:
    for question, answer in (("Tell me a story.", TOLD), ("What is aserve?", SAID)):
        asked = TURN.format(question)
        await ask(engine, f"{asked}{answer}\n{asked}", greedy(16))


# What records are like.


def pieces(record: Record, kind: str) -> list[list[Any]]:
    return [piece for piece in record.get("work", {}).get("pieces", ()) if piece[1] == kind]


def admits(source: str, matched: int = 0) -> Condition:
    return lambda record: any(one[2] == source and one[1] >= matched for one in record.get("admitted", ()))


def moves(what: str) -> Condition:
    return lambda record: any(one[1] == what for one in record.get("moves", ()))


def works(name: str) -> Condition:
    return lambda record: bool(record.get("work", {}).get(name))


def chunk(*, first: bool) -> Condition:
    return lambda record: any((start == 0) is first and num > 16 for _, _, start, num, *_ in pieces(record, "prefill"))


def mixed(record: Record) -> bool:
    return bool(pieces(record, "prefill")) and bool(record["work"].get("decodes"))


def drafts(condition: Callable[[int, int], bool]) -> Condition:
    return lambda record: any(condition(piece[4], piece[5]) for piece in pieces(record, "draft"))


def waits(*holds: str) -> Condition:
    return lambda record: record.get("queue", {}).get("hold") in holds


SIZE = {"model": "demo", "max_num_seqs": 4, "block_size": 16}
SMALL = {**SIZE, "max_model_len": 128, "kv_cache_memory_bytes": 10 * BLOCK_BYTES, "watermark": 0.0}
SCENES: Final = (
    Scene(
        "chunked-prefill.json",
        "A long prompt, piece by piece",
        {**SIZE, "max_model_len": 512, "max_num_batched_tokens": 48, "kv_cache_memory_bytes": 41 * BLOCK_BYTES},
        long_prompt,
        (
            (
                works("pieces"),
                "A request arrives and takes a lane. Its prompt, which is hatched, is computed in one step; from then "
                "on each step computes one token of its answer, which is solid.",
            ),
            (
                lambda record: mixed(record) and chunk(first=True)(record),
                "A second one comes, with a prompt of more tokens than a step may compute (48 here). It gets what the "
                "budget leaves, and the first request goes on beside it: nobody's stream stops for a long prompt.",
            ),
            (
                lambda record: mixed(record) and chunk(first=False)(record),
                "The prompt goes on in the next step, where the last one ended. To the scheduler there is no prefill "
                "phase: a sequence has computed so many of its tokens, and catches up.",
            ),
            (
                lambda record: len(record.get("work", {}).get("decodes", ())) == 2,
                "The prompt is whole, and both answers grow by a token a step. In the grid, blocks of their prompts "
                "have a notch: they are full, and whoever asks with the same beginning will find them.",
            ),
            (
                moves("ended"),
                "The first answer is over. Its blocks stay cached, crossed out, until somebody needs them.",
            ),
        ),
    ),
    Scene(
        "prefix-hit.json",
        "The same beginning is computed once",
        {**SIZE, "max_model_len": 512, "kv_cache_memory_bytes": 41 * BLOCK_BYTES},
        same_beginning,
        (
            (works("pieces"), "A request with a long beginning: nothing of it is known yet, so all of it is computed."),
            (
                moves("ended"),
                "It has ended. Nobody holds its blocks any more, and they bear the hashes of what is in them.",
            ),
            (
                admits("cache", 64),
                "Two requests come with the same beginning. Their first blocks are found by hash and shared: the tree "
                "shows them as one, hatched where they were found. Only what differs is computed.",
            ),
            (
                lambda record: len(record.get("work", {}).get("decodes", ())) == 2,
                "A shared block has the number of those who hold it. Behind it each has blocks of its own, for there "
                "their texts part.",
            ),
            (moves("ended"), "When one ends, the other keeps what they shared: blocks count their holders."),
        ),
    ),
    Scene(
        "beam-search.json",
        "Three beams, and copies on write",
        {**SIZE, "max_model_len": 256, "kv_cache_memory_bytes": 33 * BLOCK_BYTES},
        beams,
        (
            (
                works("pieces"),
                "A beam search keeps the three likeliest answers. The prompt is computed by the first beam.",
            ),
            (
                admits("fork"),
                "The other two fork from it: they share its full blocks. The last block, which all three are about to "
                "write, is copied for each; that is copy on write.",
            ),
            (
                works("decodes"),
                "Each step tells what may follow each beam, and the search chooses. A beam waits for the others, for "
                "its next token depends on theirs: none of its steps is planned ahead.",
            ),
            (
                lambda record: works("copies")(record) and not record.get("admitted"),
                "A beam is given up and another goes on twice: the loser's slot takes the winner's blocks. Full ones "
                "are shared, and only the one that is being written is copied.",
            ),
            (moves("ended"), "The search is over, and all blocks are given back."),
        ),
    ),
    Scene(
        "swap.json",
        "Memory is short: swapped to the host",
        {**SMALL, "swap_space": 0.0004, "preemption_mode": "swap"},
        too_much,
        (
            (
                works("decodes"),
                "An engine with nine blocks. Two answers grow in it, and both need more blocks as they do.",
            ),
            (
                moves("swap"),
                "No block is free. Who came last gives way: what its blocks hold is copied to the host, and the older "
                "one goes on.",
            ),
            (
                lambda record: works("decodes")(record) and len(record["work"]["decodes"]) == 1,
                "It waits there with all it has computed. In the grid its blocks have a border: they are on the host.",
            ),
            (
                admits("swap"),
                "The older one is done, so there is room: the blocks come back, and the answer goes on where it "
                "stopped. Nothing is computed twice.",
            ),
            (moves("ended"), "It ends as if nothing had happened: its tokens are those that it would have had alone."),
        ),
    ),
    Scene(
        "recompute.json",
        "Memory is short: computed again",
        {**SMALL, "preemption_mode": "recompute"},
        too_much,
        (
            (works("decodes"), "The same two requests, in an engine without room on the host."),
            (
                moves("recompute"),
                "No block is free. Who came last gives its blocks up and goes back to the head of the queue. The "
                "tokens that it has sampled are kept.",
            ),
            (
                waits("memory"),
                "It waits until there is memory for all of its tokens: prompt and answer. What keeps the first of "
                "those who wait is told beside the requests.",
            ),
            (
                lambda record: bool(pieces(record, "prefill")),
                "There is room. Prompt and answer so far are computed in one go, as a prompt is, and what is still in "
                "the prefix cache is not computed at all. For short texts that costs less than to copy.",
            ),
            (moves("ended"), "It ends as if nothing had happened."),
        ),
    ),
    Scene(
        "drafts.json",
        "Guessed tokens, verified together",
        {
            **SIZE,
            "max_model_len": 256,
            "kv_cache_memory_bytes": 33 * BLOCK_BYTES,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        },
        quotes,
        (
            (
                works("pieces"),
                "The prompt asks again what it has asked before, so the answer may quote the one that is there. Words "
                "that followed upon the latest ones are guesses.",
            ),
            (
                drafts(lambda num, accepted: accepted > 0),
                "A step computes the next token and guesses behind it. A guess is right if it is the token that is "
                "sampled there anyway. The bar is filled as far as they were: several tokens from one step.",
            ),
            (
                drafts(lambda num, accepted: accepted < num),
                "Another request. Here a guess was wrong. What was computed behind it counts for nothing and "
                "is computed again; the answer is the same as without guesses.",
            ),
            (
                moves("ended"),
                "How many are guessed depends on how often guesses were right and on what a step costs: with many "
                "streams at once there are none, for the device has enough to do.",
            ),
        ),
    ),
)


async def record(scene: Scene) -> bytes:
    """The recording of a scene, as the page reads it."""
    events: list[dict[str, Any]] = []
    async with Engine(loader(make_options(**scene.options))) as engine:
        await ask(engine, "Hello", greedy(2))  # what is only done once
        engine.reset_prefix_cache()
        feed = Feed(engine, None)
        observer = engine.observer
        events += parsed(feed.hello("demo", engine.config, observer.now_us()))
        with observer.viewer() as viewer:
            events += parsed(feed.events(await viewer.news()))
            await scene.play(engine)
            observer.looked(0.0, None)
            news = await viewer.news()
            events += parsed(feed.events(msgspec.structs.replace(news, records=tuple(at_length(news.records)))))
    hello, snapshot, *rest = events
    records = [one for event in rest for one in event["records"] if one.keys() - {"number", "at_us", "lag_us"}]
    shift(snapshot, records)
    captions = captioned(scene, records)
    hello["now_us"], hello["unix_s"] = BEGINS_US, 0.0
    head = {"type": "recording", "version": VERSION, "title": scene.title, "captions": captions, "hello": hello}
    return msgspec.json.encode({**head, "snapshot": snapshot, "chunks": [records]})


def parsed(told: bytes) -> list[dict[str, Any]]:
    """Events, from how they are sent."""
    return [msgspec.json.decode(line[6:]) for line in told.split(b"\n\n") if line]


def shift(snapshot: dict[str, Any], records: list[Record]) -> None:
    """Let numbers and times begin where every scene's do; what nobody looks at is left out."""
    first_us, first = snapshot["at_us"] - BEGINS_US, snapshot["number"]
    snapshot["at_us"], snapshot["number"] = BEGINS_US, 0
    for number, record in enumerate(records, 1):
        assert record["number"] > first, "the snapshot comes first"
        record["number"] = number
        record["at_us"] -= first_us
        record.pop("lag_us", None)
        if "work" in record:
            record["work"]["began_us"] -= first_us
        for card in record.get("cards", ()):
            card["arrived_us"] -= first_us
            card["id"] = ""


def captioned(scene: Scene, records: list[Record]) -> list[dict[str, Any]]:
    """Each caption with the record that it is about. Raises `LookupError` for one that is about none."""
    captions, index = [], 0
    for condition, words in scene.captions:
        found = next((at for at in range(index, len(records)) if condition(records[at])), None)
        if found is None:
            raise LookupError(f"{scene.name}: nothing is as it is told: {words}")
        captions.append({"number": records[found]["number"], "words": words})
        index = found + 1
    return captions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for scene in SCENES:
        recording = asyncio.run(record(scene))
        (folder / scene.name).write_bytes(recording + b"\n")
        print(f"{scene.name}: {len(recording)} bytes")
    (folder / "index.json").write_bytes(msgspec.json.encode([scene.name for scene in SCENES]) + b"\n")


if __name__ == "__main__":
    main()

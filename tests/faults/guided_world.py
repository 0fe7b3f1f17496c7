"""A world with adapters, structures, tools, thoughts and drafts: the rooms of a server that was told to have them."""

import asyncio
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from aserve.adapters import Adapters
from aserve.core.ids import AdapterId
from aserve.core.plan import RowInit
from aserve.core.speculation import StepSeconds
from aserve.drafting.draft_model import DraftModelProposer
from aserve.scheduler.scheduler import Scheduler
from tests.engines import EOS, TEMPLATE
from tests.fakes import FakeKV
from tests.faults.world import (
    BLOCK_SIZE,
    CHAT,
    LETTERS,
    MAX_MODEL_LEN,
    TEXT,
    WHOSE,
    Answer,
    InlineExecutor,
    World,
    in_time,
)

NUM_DRAFTED_ROWS = 5
"""Fewer than there are sequences, so that rows of the draft model are taken from others."""
SPEAKABLE = [*range(ord("!"), ord("~") + 1)] * 8 + [ord(" "), ord("\n"), EOS]
"""What an answer with a structure is made of: it has less white space than JSON may have."""
COMER = "adapter that comes and goes"
SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["Rome", "Oslo", "Lima"]}},
    "required": ["to"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
THINKS = {"chat_template_kwargs": {"thinks": True}}
HI = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
ASKED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "first": (TEXT, {"model": "first", "prompt": "abcabc", "max_tokens": 5, "temperature": 0}),
    "second": (TEXT, {"model": "second", "prompt": "abcabc", "max_tokens": 5, "temperature": 0, "stream": True}),
    "first again": (TEXT, {"model": "first", "prompt": "dabc", "max_tokens": 4, "temperature": 0}),
    "schema": (CHAT, HI | {"response_format": FORMAT}),
    "forced": (
        TEXT,
        {"prompt": "x", "structured_outputs": {"regex": "(ab|ba)cdcdcdcd(ab|ba)"}, "stream": True, "temperature": 0},
    ),
    "tools": (CHAT, HI | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90}),
    "tools stream": (
        CHAT,
        HI
        | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90, "stream": True},
    ),
    "free": (CHAT, HI | {"tools": [TOOL], "max_tokens": 9, "stream": True}),
    "thinks": (CHAT, HI | THINKS | {"thinking_token_budget": 4, "max_tokens": 24, "stream": True}),
    "thinks, then a schema": (CHAT, HI | THINKS | {"thinking_token_budget": 3, "response_format": FORMAT, "n": 2}),
    "thinks, then a tool": (
        CHAT,
        HI
        | THINKS
        | {"thinking_token_budget": 5, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        | {"max_tokens": 110},
    ),
    "drafted": (TEXT, {"prompt": "dcba", "max_tokens": 14, "temperature": 0}),
    "sampled": (TEXT, {"prompt": "some", "max_tokens": 8, "temperature": 1, "seed": 3, "n": 2, "stream": True}),
    "plain": (TEXT, {"prompt": "plain", "max_tokens": 6, "temperature": 0}),
}


class Store:
    """An `AdapterStore` that keeps folders."""

    def __init__(self) -> None:
        self.folders: dict[AdapterId, str] = {}

    def load(self, adapter: AdapterId, folder: str) -> None:
        """As the Protocol says."""
        self.folders[adapter] = folder

    def drop(self, adapter: AdapterId) -> None:
        """As the Protocol says."""
        del self.folders[adapter]

    def mark(self, init: RowInit) -> int:
        """What an adapter does to keys and values."""
        return 0 if init.adapter is None else zlib.crc32(self.folders[init.adapter].rsplit("/")[-1].encode())


class GuidedWorld(World):
    """Two adapters and a third that comes and goes, with room for one at a time; a draft model; forced tokens."""

    asked = ASKED
    chat_template = (
        TEMPLATE + "{% if tools %}{{ tools | length }}{% endif %}<think>{% if not thinks %}</think>{% endif %}"
    )
    formats = MappingProxyType({"call_format": "hermes", "thought_format": "think"})

    def __init__(self, *, failing_steps: tuple[int, ...] = ()) -> None:
        self.store = Store()
        self.proposer = DraftModelProposer(
            most=3,
            num_blocks=40,
            block_size=BLOCK_SIZE,
            num_rows=NUM_DRAFTED_ROWS,
            context_len=MAX_MODEL_LEN,
            max_catch_up=64,
            step_seconds=StepSeconds(0.0, 0.0),
        )
        super().__init__(failing_steps=failing_steps)
        self.adapters = Adapters(self.store, max_loaded=1, root="/", taken=("scripted",))
        self.adapters._reader = InlineExecutor(1)
        for name in ("first", "second"):
            self.adapters.add_now(name, f"/{name}")

    def new_scheduler(self, **more: Any) -> Scheduler:
        """With what adapters and drafts need."""
        return super().new_scheduler(proposer=self.proposer, max_loras=1, **more)

    def new_model(self) -> FakeKV:
        """Its drafts are right where a row has no adapter and is greedy."""
        return FakeKV(
            BLOCK_SIZE,
            LETTERS,
            self.store.mark,
            seeded=True,
            draft_model=FakeKV(BLOCK_SIZE, LETTERS),
            masked_vocabulary=SPEAKABLE,
        )

    async def answers(self) -> dict[str, Answer]:
        """With those of a client who brings an adapter of its own."""
        comer = asyncio.create_task(self._come_and_go())
        answers = await super().answers()
        await in_time([comer])
        return answers | {COMER: comer.result()}

    async def _come_and_go(self) -> Answer:
        """The first of three answers that is not 200, or that of the request which the adapter serves."""
        WHOSE.set(COMER)
        loaded = await self.ask(COMER, "/v1/load_lora_adapter", {"lora_name": "third", "lora_path": "third"})
        if loaded.status != 200:
            return loaded
        asked = {"model": "third", "prompt": "abcabc", "max_tokens": 5, "temperature": 0}
        answer = await self.ask(COMER, TEXT, asked)
        gone = await self.ask(COMER, "/v1/unload_lora_adapter", {"lora_name": "third"})
        return answer if gone.status == 200 else gone

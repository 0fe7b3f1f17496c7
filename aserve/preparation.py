"""What a long prompt needs before the scheduler takes it, done piece by piece on the event loop.

    prompt a    check      .      hash      .      hash      .       one piece in a turn of the loop, of whoever waited
    prompt b      .      check      .     hash       .      hash     longest; between two of them is all its other work

Not in a thread: while one computes in Python, the event loop waits for the GIL before every callback, each time as long
as the thread's next piece. Not at one stroke: a prompt of 200 000 tokens takes 40 ms.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from aserve.core.config import ModelInfo
from aserve.core.ids import BlockHash
from aserve.core.request import Request
from aserve.intake import check_ids
from aserve.scheduler.scheduler import Scheduler

SHORT_PROMPT_TOKENS: Final = 512
"""Up to here a prompt is checked at once, and hashed by the plan that admits it."""
TOKENS_AT_ONCE: Final = 4096
"""Checked in a turn."""

T = TypeVar("T")


class Preparer:
    """Prepares the requests of one engine, in turn with each other and with the event loop's other work."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def prepared(self, request: Request, info: ModelInfo, scheduler: Scheduler) -> Request:
        """With its prompt's ids checked and, if it is long, the hashes of its blocks. Raises `InvalidRequestError`."""
        token_ids = request.prompt_token_ids
        if len(token_ids) <= SHORT_PROMPT_TOKENS:
            check_ids("prompt", token_ids, info.vocab_size)
            return request
        for start in range(0, len(token_ids), TOKENS_AT_ONCE):
            await self._in_turn(check_ids, "prompt", token_ids[start : start + TOKENS_AT_ONCE], info.vocab_size)
        hashes: list[BlockHash] = []
        pieces = scheduler.prompt_hashes(request)
        while piece := await self._in_turn(next, pieces, None):
            hashes.extend(piece)
        return msgspec.structs.replace(request, prompt_hashes=tuple(hashes))

    async def _in_turn(self, work: Callable[..., T], *arguments: Any) -> T:
        """Call it in a turn of the event loop in which no other piece is done."""
        async with self._turn:
            await asyncio.sleep(0)
            return work(*arguments)

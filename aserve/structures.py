"""Structures: what answers are asked to be, compiled in a thread before their requests are opened, within a time.

    request's task --> a turn? --> thread: Compiler --> Structure, or the 400 that says what is wrong
                       2 compile at once                '--> 2 s are over: 400; its turn ends when the thread is done

Knows neither llguidance, which is imported with the first structure, nor who compiles what.
"""

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Final

from aserve.core.config import ModelInfo
from aserve.core.errors import InvalidRequestError, OverloadedError
from aserve.core.ports import Structure
from aserve.core.structured import StructuredOutputs
from aserve.text.formats.choice import thought_markers
from aserve.text.tokenizer import Tokenizer
from aserve.workers import Workers

if TYPE_CHECKING:
    from aserve.constraints.compiler import Compiler
    from aserve.constraints.thinking import Budget

COMPILE_S: Final = 2.0
"""For a structure to be compiled, and as long for a turn."""
LOOKS: Final = 20
"""In which that time passes: where the whole process stands still, however long, one of them is over, and not all."""
AT_ONCE: Final = 2
"""Structures that are compiled at once, of the threads that texts have."""


class Structures:
    """Of one engine. info: its model's."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo, workers: Workers) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._workers = workers
        self._compiler: Compiler | None = None
        self._budget: Budget | None = None
        self._importing = threading.Lock()
        self._turns = asyncio.Semaphore(AT_ONCE)

    def bounded(self, structure: Structure | None, budget: int, *, in_thought: bool) -> Structure:
        """With a budget of thinking tokens. in_thought: the prompt has begun a thought.

        Raises `InvalidRequestError` where no thoughts of the model's are known.
        """
        from aserve.constraints.thinking import BoundedThinking, Budget, Thought

        if (thoughts := thought_markers(self._info)) is None:
            raise InvalidRequestError(
                "thinking_token_budget is for models whose answers have thoughts; this one's have none that are known "
                "(reasoning_parser names another format)",
                "thinking_token_budget",
            )
        if self._budget is None:
            self._budget = Budget(self._tokenizer, thoughts, self._info.vocab_size)
        return BoundedThinking(self._budget, budget, Thought(in_thought), structure)

    async def compiled(self, structured: StructuredOutputs) -> Structure:
        """Raises `InvalidRequestError` for what is malformed, contradictory, cannot be enforced or takes too long.

        And `OverloadedError` where others that are being compiled leave it no turn.
        """
        turn = asyncio.ensure_future(self._turns.acquire())
        try:
            if not await _in_time(turn):
                raise OverloadedError("other structures are being compiled, and take long")
        except BaseException:
            if not turn.cancel() and not turn.cancelled():  # it came with the end of the time
                self._turns.release()
            raise
        has_begun = threading.Event()
        work = asyncio.ensure_future(self._workers.run(self._begin, structured, has_begun))
        work.add_done_callback(self._done)
        if await _in_time(work):
            return work.result()
        if not has_begun.is_set():
            raise OverloadedError("no thread is free to compile a structure")
        raise InvalidRequestError(
            f"structured.{structured.kind} takes more than {COMPILE_S:g} s to compile: it is too complex", "structured"
        )

    def _done(self, work: "asyncio.Future[Structure]") -> None:
        self._turns.release()
        if not work.cancelled():
            work.exception()  # nobody may be left to hear of it

    def _begin(self, structured: StructuredOutputs, has_begun: threading.Event) -> Structure:
        has_begun.set()
        return self.compile(structured)

    def compile(self, structured: StructuredOutputs) -> Structure:
        """In a thread: `compiled`, as long as it takes."""
        with self._importing:
            if self._compiler is None:
                from aserve.constraints.compiler import Compiler

                self._compiler = Compiler(self._tokenizer, self._info.vocab_size, self._info.eos_ids)
        return self._compiler.compiled(structured)


async def _in_time(work: "asyncio.Future[Any]") -> bool:
    """Wait for something within its time; whether it is done. What is not is left as it is."""
    for _ in range(LOOKS):
        done, _ = await asyncio.wait({work}, timeout=COMPILE_S / LOOKS)
        if done:
            return True
    return False

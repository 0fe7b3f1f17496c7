"""LLM: the blocking face of the engine, for scripts, and for notebooks, where an event loop is running."""

import asyncio
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence, Sized
from os import PathLike
from types import TracebackType
from typing import Any, Final, Self, TypeVar, Unpack

from tqdm import tqdm

from aserve.answers import Messages, Prompt
from aserve.build import AsyncEngine
from aserve.core.config import ModelInfo, OptionFields
from aserve.core.errors import UnavailableError
from aserve.core.outputs import Completion
from aserve.core.params import BeamParams, SamplingParams
from aserve.core.pooling import Pooled, PoolingParams
from aserve.core.request import RequestTerms, SharedTerms
from aserve.core.rules import Rule, check, series
from aserve.loop_thread import LoopThread
from aserve.scheduler.statistics import Statistics
from aserve.vectors import SharedInputTerms

T = TypeVar("T")

_PROMPTS: Final = series("a text, a sequence of token ids, or a sequence of such")
_CONVERSATIONS: Final = series("a sequence of messages, or a sequence of such")
_PARAMS: Final = series("SamplingParams, or a sequence of them")
_REQUEST_IDS: Final = series("a sequence of texts")


class LLM:
    """Loads a model and answers lists of prompts, all of them in one continuous batch.

    model and options: as for AsyncEngine, but that target_itl_ms is 0 where it is not given: nobody reads along, so
    that steps may take as many tokens of prompts as they hold beside those who decode. Its event loop has a thread of
    its own, so that it does not matter whether one is running where it is used; one that is, waits as long as a call
    does. May be used by several threads at once: then they share the batch. Ctrl-C ends a call, and the next one works.

    Use as a context manager, or call `close`, to give back the memory before the process ends. A process that is forked
    has to make its own. Raises ConfigError or CheckpointError.
    """

    def __init__(self, model: str | PathLike[str] = "demo", **options: Unpack[OptionFields]) -> None:
        options.setdefault("target_itl_ms", 0.0)
        engine = AsyncEngine(model, **options)
        self._thread = thread = LoopThread("aserve LLM")
        self._close = weakref.finalize(self, _end, engine, thread)
        try:
            self._engine = thread.run(engine.__aenter__())
        except BaseException:
            self._close()
            raise

    # Answers

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        request_ids: Sequence[str] | None = None,
        **terms: Unpack[SharedTerms],
    ) -> list[Completion]:
        """Complete prompts (texts or sequences of token ids), in their order. One `params` for all, or one each.

        A prompt with n choices has n completions, one after the other by `index`: choice k of prompt p is at p * n + k.

        request_ids: one each, for `abort` from another thread. terms: cache_salt, priority, timeout_s and lora of each,
        see `SharedTerms`.

        Raises what `AsyncEngine.open` raises for the first prompt that cannot be answered, then none is;
        `UnavailableError` after `close` and in a forked process; ValueError when there are not as many params, or
        request_ids, as prompts.
        """
        several = _prompts(prompts)
        return self._run(lambda: self._generate(several, params, use_tqdm, request_ids, terms))

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        request_ids: Sequence[str] | None = None,
        **terms: Unpack[SharedTerms],
    ) -> list[Completion]:
        """Answer one conversation (a list of {"role", "content"}) or several. Otherwise as `generate`."""
        given = check("conversations", _CONVERSATIONS, conversations)
        several = [given] if given and isinstance(given[0], Mapping) else given

        async def answer() -> list[Completion]:
            prompts = [await self._engine.encode_chat(messages, must_fit=True) for messages in several]
            return await self._generate(prompts, params, use_tqdm, request_ids, terms, starts_text=True)

        return self._run(answer)

    def beam_search(
        self,
        prompt: Prompt,
        beam: BeamParams,
        *,
        n: int | None = None,
        max_tokens: int | None = None,
        **terms: Unpack[RequestTerms],
    ) -> list[Completion]:
        """The n best hypotheses of one prompt, best first; see `AsyncEngine.beam_search`."""
        found = self._run(lambda: self._engine.beam_search(prompt, beam, n=n, max_tokens=max_tokens, **terms))
        return list(found)

    # Vectors, by a model that pools

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        per_token: bool = False,
        **terms: Unpack[SharedInputTerms],
    ) -> list[Pooled]:
        """The embeddings of texts or sequences of token ids, in their order; see `AsyncEngine.embed`."""
        params = PoolingParams(dimensions=dimensions, use_activation=use_activation, per_token=per_token)
        several = _prompts(prompts)
        return self._run(lambda: self._engine.pool_prompts(several, params, "embed", **terms))

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        per_token: bool = False,
        **terms: Unpack[SharedInputTerms],
    ) -> list[Pooled]:
        """A number for each label, of each prompt; see `AsyncEngine.classify`."""
        several, params = _prompts(prompts), PoolingParams(use_activation=use_activation, per_token=per_token)
        return self._run(lambda: self._engine.pool_prompts(several, params, "classify", "reward", **terms))

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        use_activation: bool | None = None,
        **terms: Unpack[SharedInputTerms],
    ) -> list[float]:
        """How well each document answers its query; one query may be for all. See `AsyncEngine.score`.

        Raises ValueError where there are neither one query nor as many as documents.
        """
        each = [documents] if isinstance(documents, str) else list(documents)
        asked = [queries] * len(each) if isinstance(queries, str) else list(queries)
        asked = asked * len(each) if len(asked) == 1 else asked
        if len(asked) != len(each):
            raise ValueError(f"queries: {len(asked)} given for {len(each)} documents")
        params, pairs = PoolingParams(use_activation=use_activation), list(zip(asked, each, strict=True))
        return self._run(lambda: self._engine.score_pairs(pairs, params, **terms))

    def abort(self, request_id: str) -> bool:
        """From another thread, end the request of this id with what it has; False where none is open."""
        return self._run(lambda: _soon(self._engine.abort, request_id))

    # Text, tokens, and what is going on

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text. Raises `InvalidRequestError` (bad text)."""
        return self._run(lambda: self._engine.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises `InvalidRequestError` for an id that is outside the vocabulary."""
        return self._run(lambda: self._engine.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def statistics(self) -> Statistics:
        """Counts of the scheduler at this moment."""
        return self._run(lambda: _soon(self._engine.statistics))

    @property
    def info(self) -> ModelInfo:
        """The model that is served. Raises `UnavailableError` after `close`."""
        return self._engine.info

    def close(self) -> None:
        """End the engine and give back threads and memory. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LLM {self._engine!r}>"

    def _run(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` comes to, in the engine's event loop."""
        if not self._close.alive:
            raise UnavailableError("the LLM is closed")

        async def call() -> T:
            return await work()

        return self._thread.run(call())

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        request_ids: Sequence[str] | None,
        terms: SharedTerms,
        *,
        starts_text: bool = False,
    ) -> list[Completion]:
        num = len(prompts)
        is_shared = params is None or isinstance(params, SamplingParams)
        each = [params] * num if is_shared else _one_each("params", _PARAMS, params, num)
        ids = [None] * num if request_ids is None else _one_each("request_ids", _REQUEST_IDS, request_ids, num)
        num_tokens = 0
        with tqdm(total=num, desc="Prompts", disable=not use_tqdm) as bar:

            async def complete(
                prompt: Prompt, one: SamplingParams | None, request_id: str | None
            ) -> tuple[Completion, ...]:
                nonlocal num_tokens
                choices = await self._engine.complete_n(
                    prompt, one, starts_text=starts_text, request_id=request_id, **terms
                )
                num_tokens += sum(len(choice.token_ids) for choice in choices)
                bar.update()
                elapsed_s = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{num_tokens / elapsed_s:.0f} output tokens/s")
                return choices

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(complete(*its)) for its in zip(prompts, each, ids, strict=True)]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None  # one cause is enough, and easier to catch
        return [choice for task in tasks for choice in task.result()]


def _end(engine: AsyncEngine, thread: LoopThread) -> None:
    """Close the engine, then its loop. Where the process is ending, memory comes back with it, and threads are gone."""
    if thread.is_inherited:  # what a forked process has of an LLM is a picture: all that would be closed is elsewhere
        return
    if thread.is_current:  # garbage is collected in whichever thread comes to it
        threading.Thread(target=_end, args=(engine, thread), name="aserve LLM: closing").start()
        return
    try:
        if threading.main_thread().is_alive():
            thread.run(engine.aclose())
    finally:
        thread.close()


async def _soon(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in the event loop, as its owner is used by its thread alone."""
    return function(*arguments)


def _prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A single prompt (a text, or token ids) as a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    given: tuple[Prompt, ...] = check("prompts", _PROMPTS, prompts)
    return [given] if given and not isinstance(given[0], Sized) else given


def _one_each(field: str, rule: Rule, values: object, num: int) -> Sequence[Any]:
    given: tuple[Any, ...] = check(field, rule, values)
    if len(given) != num:
        raise ValueError(f"{field}: {len(given)} given for {num} prompts")
    return given

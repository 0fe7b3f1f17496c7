"""LLM: the blocking face of the engine, for scripts and notebooks without an event loop."""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from aserve.answers import Prompt
from aserve.build import AsyncEngine
from aserve.core.errors import UnavailableError
from aserve.core.outputs import Completion
from aserve.core.params import SamplingParams

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """Loads a model and answers lists of prompts, all of them in one continuous batch.

    model and options: as for AsyncEngine, which is what to use inside a running event loop: there every method of this
    class raises RuntimeError. Use as a context manager, or call `close`, to give back the memory before the process
    ends. Raises ConfigError or CheckpointError.
    """

    def __init__(self, model: str = "demo", **options: Any) -> None:
        _refuse_event_loop()
        self._closed = False
        self._runner = asyncio.Runner()
        try:
            self._engine = self._runner.run(AsyncEngine(model, **options).__aenter__())
        except BaseException:
            self._runner.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete prompts (texts or lists of token ids), in their order. One `params` for all, or one each.

        A prompt with n choices has n completions, one after the other by `index`: choice k of prompt p is at p * n + k.

        Raises what `AsyncEngine.open` raises for the first prompt that cannot be answered, then none is;
        `UnavailableError` after `close`; ValueError when there are not as many params as prompts.
        """
        self._check_usable()
        return self._runner.run(self._generate(_as_list(prompts), params, use_tqdm))

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Answer one conversation (a list of {"role", "content"}) or several. Order and errors as `generate`."""
        self._check_usable()
        first = conversations[0] if conversations else ()
        several = [conversations] if isinstance(first, Mapping) else conversations
        return self._runner.run(self._chat(several, params, use_tqdm))  # type: ignore[arg-type]  # narrowed by `first`

    def close(self) -> None:
        """End the engine and give back threads and memory. Idempotent."""
        if self._closed:
            return
        _refuse_event_loop()
        self._closed = True
        try:
            self._runner.run(self._engine.aclose())
        finally:
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        _refuse_event_loop()
        if self._closed:
            raise UnavailableError("the LLM is closed")

    async def _chat(
        self,
        conversations: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[Completion]:
        prompts = [await self._engine.encode_chat(messages) for messages in conversations]
        return await self._generate(prompts, params, use_tqdm)

    async def _generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[Completion]:
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: {len(each)} given for {len(prompts)} prompts")
        num_tokens = 0
        with tqdm(total=len(prompts), desc="Prompts", disable=not use_tqdm) as bar:

            async def complete(prompt: Prompt, one: SamplingParams | None) -> tuple[Completion, ...]:
                nonlocal num_tokens
                choices = await self._engine.complete_n(prompt, one)
                num_tokens += sum(len(choice.token_ids) for choice in choices)
                bar.update()
                elapsed_s = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{num_tokens / elapsed_s:.0f} output tokens/s")
                return choices

            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(complete(p, one)) for p, one in zip(prompts, each, strict=True)]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None  # one cause is enough, and easier to catch
        return [choice for task in tasks for choice in task.result()]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A single prompt (a text, or a list of token ids) as a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # a Sequence[int], by the test above
    return prompts  # type: ignore[return-value]  # a sequence of prompts, by the same test


def _refuse_event_loop() -> None:
    """Raises RuntimeError where an event loop is running: to block in it would stop all that it serves."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("LLM blocks, and an event loop is running here: use AsyncEngine, or LLM in asyncio.to_thread")

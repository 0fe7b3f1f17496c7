"""POST /v1/completions."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from aserve.core.outputs import Completion, TextDelta
from aserve.engine import AsyncEngine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.openai.generation import Generation, TokenIds, answer
from aserve.http.openai.schema import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionFields,
    check_model,
    parse,
    prompts_of,
    sampling_params,
)
from aserve.http.sse import StreamLimits

_encode: Final = msgspec.json.encode


def completions(engine: AsyncEngine, limits: StreamLimits) -> Handler:
    """The handler of this route."""

    async def handle(exchange: Exchange) -> None:
        fields = parse(exchange.fields, CompletionFields)
        model = check_model(engine.info, fields.model)
        params = sampling_params(engine, fields, DEFAULT_COMPLETION_TOKENS)
        generation = Generation(
            prompts=[await _token_ids(engine, prompt) for prompt in prompts_of(fields.prompt)],
            params=params,
            stream=bool(fields.stream),
            include_usage=fields.include_usage,
        )
        wire = TextWire(f"cmpl-{exchange.request_id}", model, with_token_ids=bool(fields.return_token_ids))
        await answer(engine, generation, wire, exchange, limits)

    return handle


async def _token_ids(engine: AsyncEngine, prompt: str | list[int]) -> TokenIds:
    if isinstance(prompt, str):
        await asyncio.sleep(0)  # a thousand short prompts, each encoded at once, must not hold the loop
        return await engine.encode(prompt)
    return tuple(prompt)


class TextWire:
    """Chunks and bodies of text completions; a choice's index is its prompt's. What never changes is encoded once.

    with_token_ids: prompt_token_ids in a choice's first chunk, token_ids in each.
    """

    def __init__(self, completion_id: str, model: str, *, with_token_ids: bool) -> None:
        self._with_token_ids = with_token_ids
        self._common = {"id": completion_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._head = b"data: " + _encode(self._common)[:-1]
        self._choice_head = self._head + b',"choices":[{"index":'

    def opening(self, index: int, prompt_token_ids: TokenIds) -> bytes:
        """Nothing, or the chunk with the prompt's token ids."""
        if not self._with_token_ids:
            return b""
        end = b',"text":"","logprobs":null,"finish_reason":null,"prompt_token_ids":%b,"token_ids":[]}]}\n\n'
        return self._choice_head + b"%d" % index + end % _encode(prompt_token_ids)

    def delta(self, delta: TextDelta) -> bytes:
        """A chunk with text; with the reasons if it is the last."""
        if delta.finish_reason is None:
            if not delta.text and not self._with_token_ids:
                return b""
            end = b',"logprobs":null,"finish_reason":null'
        else:
            end = b',"logprobs":null,"finish_reason":"%b","stop_reason":%b' % (
                delta.finish_reason.encode(),
                _encode(delta.stop_reason),
            )
        token_ids = b',"token_ids":' + _encode(delta.token_ids) if self._with_token_ids else b""
        start = b'%d,"text":' % delta.index
        return b"".join((self._choice_head, start, _encode(delta.text), end, token_ids, b"}]}\n\n"))

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices."""
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n"

    def whole(self, completions: Sequence[Completion], usage: dict[str, Any]) -> dict[str, Any]:
        """The text_completion object."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._common, "choices": choices, "usage": usage}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._with_token_ids:
            choice |= {"prompt_token_ids": completion.prompt_token_ids, "token_ids": completion.token_ids}
        return choice

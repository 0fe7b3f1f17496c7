"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from aserve.core.errors import InvalidRequestError
from aserve.core.outputs import Completion, TextDelta
from aserve.engine import AsyncEngine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.openai.generation import Generation, TokenIds, answer
from aserve.http.openai.schema import ChatFields, check_model, parse, sampling_params
from aserve.http.sse import StreamLimits

_encode: Final = msgspec.json.encode


def chat_completions(engine: AsyncEngine, limits: StreamLimits) -> Handler:
    """The handler of this route."""

    async def handle(exchange: Exchange) -> None:
        fields = parse(exchange.fields, ChatFields)
        model = check_model(engine.info, fields.model)
        params = sampling_params(engine, fields)
        prompt = await engine.encode_chat(exchange.fields["messages"])
        generation = Generation(
            prompts=[prompt],
            params=params,
            stream=bool(fields.stream),
            include_usage=fields.include_usage,
            starts_text=True,
        )
        wire = ChatWire(f"chatcmpl-{exchange.request_id}", model, with_token_ids=bool(fields.return_token_ids))
        try:
            await answer(engine, generation, wire, exchange, limits)
        except InvalidRequestError as error:
            if error.param == "prompt":  # what the engine calls a prompt, this API calls messages
                error.param = "messages"
            raise

    return handle


class ChatWire:
    """Chat chunks and chat completions. What is the same in every chunk is encoded once.

    with_token_ids: prompt_token_ids in the first chunk, token_ids in each.
    """

    def __init__(self, completion_id: str, model: str, *, with_token_ids: bool) -> None:
        self._with_token_ids = with_token_ids
        self._common = {"created": int(time.time()), "model": model}
        self._id = completion_id
        shared = _encode({"id": completion_id, "object": "chat.completion.chunk", **self._common})
        self._head = b"data: " + shared[:-1]
        self._choice_head = self._head + b',"choices":[{"index":'

    def opening(self, index: int, prompt_token_ids: TokenIds) -> bytes:
        """The chunk with the role."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        prompt = b',"prompt_token_ids":' + _encode(prompt_token_ids) if self._with_token_ids else b""
        return self._head + b',"choices":[' + _encode(choice) + b"]" + prompt + b"}\n\n"

    def delta(self, delta: TextDelta) -> bytes:
        """A chunk with text; with the reasons if it is the last."""
        if delta.finish_reason is None:
            if not delta.text and not self._with_token_ids:
                return b""
            end = b'},"logprobs":null,"finish_reason":null'
        else:
            end = b'},"logprobs":null,"finish_reason":"%b","stop_reason":%b' % (
                delta.finish_reason.encode(),
                _encode(delta.stop_reason),
            )
        token_ids = b',"token_ids":' + _encode(delta.token_ids) if self._with_token_ids else b""
        start = b'%d,"delta":{"content":' % delta.index
        return b"".join((self._choice_head, start, _encode(delta.text), end, token_ids, b"}]}\n\n"))

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk without choices."""
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n"

    def whole(self, completions: Sequence[Completion], usage: dict[str, Any]) -> dict[str, Any]:
        """The chat.completion object."""
        [completion] = completions
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        body = {"id": self._id, "object": "chat.completion", **self._common, "choices": [choice], "usage": usage}
        if self._with_token_ids:
            choice["token_ids"] = completion.token_ids
            body["prompt_token_ids"] = completion.prompt_token_ids
        return body

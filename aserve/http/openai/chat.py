"""POST /v1/chat/completions."""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from aserve.core.errors import InvalidRequestError
from aserve.core.outputs import Completion, TextDelta
from aserve.core.plan import TokenScores
from aserve.engine import Engine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.openai.generation import Generation, Usage, answer
from aserve.http.openai.logprobs import Speller, chat_logprobs, prompt_logprobs
from aserve.http.openai.prompts import chat_prompt, check_room, truncated
from aserve.http.openai.schema import ChatFields, adapter_of, check_model, parse, sampling_params
from aserve.http.openai.structured import told_as_asked
from aserve.http.openai.tally import TokenIds, usage_suffix
from aserve.http.sse import StreamLimits

_encode: Final = msgspec.json.encode


def chat_completions(engine: Engine, limits: StreamLimits) -> Handler:
    """The handler of this route."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, ChatFields)
        with told_as_asked(fields.structured_outputs):
            await _answer(engine, limits, exchange, fields)

    return handle


async def _answer(engine: Engine, limits: StreamLimits, exchange: Exchange, fields: ChatFields) -> None:
    model = check_model(engine, fields.model)
    check_room(engine, fields, exchange)
    params = sampling_params(
        engine,
        fields,
        max_tokens=fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens,
        num_logprobs=fields.num_logprobs,
        num_prompt_logprobs=fields.prompt_logprobs,
    )
    prompt = truncated(engine, fields, params, await chat_prompt(engine, fields, exchange.fields["messages"]))
    generation = Generation(
        prompts=[prompt],
        params=params,
        stream=bool(fields.stream),
        include_usage=fields.include_usage,
        continuous_usage=fields.continuous_usage,
        starts_text=not fields.continue_final_message,
        cache_salt=fields.cache_salt or "",
        priority=fields.priority or 0,
        tenant=exchange.tenant,
        lora=adapter_of(engine, model),
        timeout_s=fields.timeout_s,
    )
    wire = ChatWire(engine, f"chatcmpl-{exchange.request_id}", model, fields)
    try:
        await answer(engine, generation, wire, exchange, limits)
    except InvalidRequestError as error:
        if error.param == "prompt":  # what the engine calls a prompt, this API calls messages
            error.param = "messages"
        raise


def _continued(fields: ChatFields) -> tuple[str, str]:
    """The role that answers, and the text of the last message, if echo asks for it and its role goes on."""
    if fields.adds_generation_prompt or not fields.messages:
        return "assistant", ""
    last = fields.messages[-1]
    if not fields.echo or last.content is None:
        return last.role, ""
    if isinstance(last.content, str):
        return last.role, last.content
    return last.role, "\n".join(str(part.get("text", "")) for part in last.content)


class ChatWire:
    """Chat chunks and chat completions. What is the same in every chunk is encoded once."""

    def __init__(self, engine: Engine, completion_id: str, model: str, fields: ChatFields) -> None:
        self._with_token_ids = bool(fields.return_token_ids)
        self._with_logprobs = bool(fields.logprobs)
        self._with_prompt_logprobs = fields.prompt_logprobs is not None
        self._speller = Speller(
            engine,
            as_ids=bool(fields.return_tokens_as_token_ids),
            skip_special_tokens=not fields.shows_special_tokens,
        )
        self._role, self._echoed = _continued(fields)
        self._common = {"created": int(time.time()), "model": model}
        self._id = completion_id
        shared = _encode({"id": completion_id, "object": "chat.completion.chunk", **self._common})
        self._head = b"data: " + shared[:-1]
        self._choice_head = self._head + b',"choices":[{"index":'

    def opening(
        self, index: int, prompt_token_ids: TokenIds, prompt_scores: Sequence[TokenScores], usage: Usage | None
    ) -> bytes:
        """The chunk with the role, and the text that is echoed."""
        choice = {
            "index": index,
            "delta": {"role": self._role, "content": self._echoed},
            "logprobs": None,
            "finish_reason": None,
        }
        prompt = b',"prompt_token_ids":' + _encode(prompt_token_ids) if self._with_token_ids else b""
        return self._head + b',"choices":[' + _encode(choice) + b"]" + prompt + usage_suffix(usage) + b"}\n\n"

    def delta(self, delta: TextDelta, usage: Usage | None) -> bytes:
        """A chunk with text; with the reasons if it is the last."""
        says_nothing = not (delta.text or self._with_token_ids or (self._with_logprobs and delta.scores))
        if delta.finish_reason is None:
            if says_nothing:
                return b""
            reasons = b',"finish_reason":null'
        else:
            reasons = b',"finish_reason":"%b","stop_reason":%b' % (
                delta.finish_reason.encode(),
                _encode(delta.stop_reason),
            )
        logprobs = b'},"logprobs":null'
        if self._with_logprobs:
            logprobs = b'},"logprobs":' + _encode(chat_logprobs(self._speller, delta.scores))
        token_ids = b',"token_ids":' + _encode(delta.token_ids) if self._with_token_ids else b""
        start = b'%d,"delta":{"content":' % delta.index
        end = b"}]" + usage_suffix(usage) + b"}\n\n"
        return b"".join((self._choice_head, start, _encode(delta.text), logprobs, reasons, token_ids, end))

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Around the text."""
        if self._with_token_ids or self._with_logprobs:
            return None
        return self._choice_head + b'%d,"delta":{"content":' % index, b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices."""
        return self._head + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n"

    def whole(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """The chat.completion object."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        body = {"id": self._id, "object": "chat.completion", **self._common, "choices": choices, "usage": usage}
        if self._with_prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self._speller, completions[0].prompt_scores)
        if self._with_token_ids:
            body["prompt_token_ids"] = completions[0].prompt_token_ids
        return body

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": self._role, "content": self._echoed + completion.text},
            "logprobs": chat_logprobs(self._speller, completion.scores) if self._with_logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._with_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

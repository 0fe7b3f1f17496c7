"""POST /v1/chat/completions."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.core.outputs import Completion, FinishReason, TextDelta
from aserve.core.params import ALL_TOKENS
from aserve.core.plan import TokenScores
from aserve.core.rules import MAX_INT
from aserve.engine import Engine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.explaining import NOTHING, Told, explained_of
from aserve.http.generation import Generation, Usage, answer
from aserve.http.openai.chunks import Chunks, usage_suffix
from aserve.http.openai.logprobs import Speller, chat_logprobs, prompt_logprobs
from aserve.http.openai.prompts import check_room, check_variables, truncated
from aserve.http.openai.schema import GenerationFields, Messages, parse, sampling_params
from aserve.http.openai.speech import Speech, message_of
from aserve.http.openai.tokens import Tokens
from aserve.http.openai.tools import Choice, Effort, Tools, Verbosity, template_hints, tool_use
from aserve.http.reading import CONTENT, Reading, enforced, reading_of
from aserve.http.served import adapter_of, check_model
from aserve.http.shapes import told_as_asked
from aserve.http.sse import StreamLimits
from aserve.http.tally import TokenIds
from aserve.http.tool_use import ToolUse

_encode: Final = msgspec.json.encode


class ChatFields(GenerationFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=ALL_TOKENS, le=MAX_INT)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    include_reasoning: bool | None = None

    @property
    def structures(self) -> dict[str, Any]:
        """As those of completions, and tools."""
        return {**super().structures, "tools": self.tools}

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens go with each. Raises `InvalidRequestError` for them without logprobs."""
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: set logprobs to true", "top_logprobs")
        return None

    @property
    def adds_generation_prompt(self) -> bool:
        """Whether the prompt ends where the assistant's answer begins; by default unless a message is continued."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def chat_completions(engine: Engine, limits: StreamLimits) -> Handler:
    """The handler of this route."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, ChatFields)
        with told_as_asked(fields.structures):
            await _answer(engine, limits, exchange, fields)

    return handle


async def _answer(engine: Engine, limits: StreamLimits, exchange: Exchange, fields: ChatFields) -> None:
    model = check_model(engine, fields.model)
    check_room(engine, fields, exchange)
    use = await exchange.work(tool_use, fields.tools, fields.tool_choice, parallel=fields.parallel_tool_calls)
    check_variables(engine, exchange.fields, with_tools=use is not None)
    params = sampling_params(
        engine,
        fields,
        max_tokens=fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens,
        num_logprobs=fields.num_logprobs,
        num_prompt_logprobs=fields.prompt_logprobs,
    )
    whole_prompt = await _prompt(engine, fields, exchange.fields["messages"], use)
    prompt = truncated(engine, fields, params, whole_prompt)
    reading = reading_of(engine, use, prompt)
    params = enforced(params, use, reading, is_of_all=fields.structured_outputs is not None)
    generation = Generation(
        prompts=[prompt],
        params=params,
        stream=bool(fields.stream),
        include_usage=fields.include_usage,
        continuous_usage=fields.continuous_usage,
        starts_text=not fields.continue_final_message,
        markers=reading.markers,
        cache_salt=fields.cache_salt or "",
        priority=exchange.priority_of(fields.priority),
        tenant=exchange.tenant,
        lora=adapter_of(engine, model),
        timeout_s=fields.timeout_s,
        name=exchange.request_id,
        explained=explained_of(engine, exchange, fields.x_aserve),
    )
    wire = ChatWire(engine, f"chatcmpl-{exchange.request_id}", model, fields, reading)
    try:
        await answer(engine, generation, wire, exchange, limits)
    except InvalidRequestError as error:
        if error.param == "prompt":  # what the engine calls a prompt, this API calls messages
            error.param = "messages"
        raise


async def _prompt(
    engine: Engine, fields: ChatFields, messages: Sequence[Mapping[str, Any]], use: ToolUse | None
) -> TokenIds:
    """The conversation in the model's template. messages: as they were sent."""
    return await engine.texts.encode_chat(
        messages,
        add_generation_prompt=fields.adds_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        variables=fields.chat_template_kwargs or {},
        hints=template_hints(fields.reasoning_effort, fields.verbosity),
        tools=None if use is None else use.for_template,
        add_special_tokens=bool(fields.add_special_tokens),
        must_fit=fields.truncate_prompt_tokens is None,
    )


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


class ChatWire(Chunks):
    """Chat chunks and chat completions. What is the same in every chunk is encoded once."""

    def __init__(
        self, engine: Engine, completion_id: str, model: str, fields: ChatFields, reading: Reading = CONTENT
    ) -> None:
        self._reading = reading
        self._shows_reasoning = fields.include_reasoning is not False
        self._speeches: dict[int, Speech] = {}
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
        super().__init__(b"data: " + shared[:-1])
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
        fields, reason = self._spoken(delta.index, delta.text, delta.finish_reason, delta.token_ids)
        says_nothing = not (any(fields.values()) or self._with_token_ids or (self._with_logprobs and delta.scores))
        if reason is None:
            if says_nothing:
                return b""
            reasons = b',"finish_reason":null'
        else:
            reasons = b',"finish_reason":"%b","stop_reason":%b' % (reason.encode(), _encode(delta.stop_reason))
        logprobs = b',"logprobs":null'
        if self._with_logprobs:
            logprobs = b',"logprobs":' + _encode(chat_logprobs(self._speller, delta.scores))
        token_ids = b',"token_ids":' + _encode(delta.token_ids) if self._with_token_ids else b""
        start = b'%d,"delta":' % delta.index
        end = b"}]" + usage_suffix(usage) + b"}\n\n"
        return b"".join((self._choice_head, start, _encode(fields), logprobs, reasons, token_ids, end))

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Around the text, where that is what is said."""
        if self._with_token_ids or self._with_logprobs or self._reading.new_parser is not None:
            return None
        return self._choice_head + b'%d,"delta":{"content":' % index, b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def whole(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """The chat.completion object."""
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        first = completions[0]
        scored = prompt_logprobs(self._speller, first.prompt_scores) if self._with_prompt_logprobs else None
        return {
            "id": self._id,
            "object": "chat.completion",
            **self._common,
            "choices": choices,
            "usage": self._detailed(usage),
            "prompt_logprobs": scored,
            "prompt_token_ids": first.prompt_token_ids if self._with_token_ids else None,
        }

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        fields, reason = self._spoken(index, completion.text, completion.finish_reason, completion.token_ids)
        message = message_of(fields, has_thoughts=self._reading.has_thoughts and self._shows_reasoning)
        if self._echoed:
            message["content"] = self._echoed + (message["content"] or "")
        return {
            "index": index,
            "message": {"role": self._role, **message},
            "logprobs": chat_logprobs(self._speller, completion.scores) if self._with_logprobs else None,
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
            "token_ids": completion.token_ids if self._with_token_ids else None,
        }

    def end(self, usage: Usage | None, told: Told = NOTHING) -> bytes:
        """As all chunks end, with the tokens of thoughts among the counts."""
        return super().end(None if usage is None else self._detailed(usage), told)

    def _detailed(self, usage: Usage) -> Usage:
        """Token counts with those of thoughts, where the model may have some."""
        if not self._reading.has_thoughts:
            return usage
        num_tokens = sum(speech.num_reasoning_tokens for speech in self._speeches.values())
        return usage | {"completion_tokens_details": {"reasoning_tokens": num_tokens}}

    def _spoken(
        self, index: int, text: str, end: FinishReason | None, token_ids: Sequence[int]
    ) -> tuple[dict[str, Any], str | None]:
        """The fields of a delta, and why the choice ended, if it did."""
        if self._reading.new_parser is None:
            return {"content": text}, end
        if index not in self._speeches:
            tokens = Tokens(self._speller.shown) if self._reading.has_thoughts else None
            self._speeches[index] = Speech(self._reading, shows_reasoning=self._shows_reasoning, tokens=tokens)
        speech = self._speeches[index]
        fields = speech.delta(text, end, token_ids)
        return fields, None if end is None else speech.reason(end)

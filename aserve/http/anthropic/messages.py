"""POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from aserve.core.errors import AserveError, InvalidRequestError
from aserve.core.outputs import DEADLINE, Completion, FinishReason, TextDelta
from aserve.core.params import SamplingParams
from aserve.core.plan import TokenScores
from aserve.core.structured import StructuredOutputs
from aserve.engine import Engine
from aserve.http.anthropic.blocks import Blocks, Piece, content_of
from aserve.http.anthropic.errors import error_object
from aserve.http.anthropic.history import turns_of
from aserve.http.anthropic.schema import MessagesFields, PromptFields, parse
from aserve.http.anthropic.tools import check_thinking, new_tool_use_id, thinking_hints, tool_use
from aserve.http.endpoint import Exchange, Handler
from aserve.http.explaining import NOTHING, Told, explained_of
from aserve.http.generation import Generation, Usage, answer
from aserve.http.json_response import JsonResponse
from aserve.http.reading import Reading, enforced, reading_of
from aserve.http.served import adapter_of, check_model
from aserve.http.shapes import told_as_asked
from aserve.http.sse import StreamLimits, named_event
from aserve.http.tally import TokenIds
from aserve.http.tool_use import ToolUse

_encode: Final = msgspec.json.encode


def messages(engine: Engine, limits: StreamLimits) -> Handler:
    """The handler that answers."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, MessagesFields)
        with _told_as_here(fields):
            await _answer(engine, limits, exchange, fields)

    return handle


def count_tokens(engine: Engine) -> Handler:
    """The handler that counts the tokens of what would be the prompt."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, PromptFields)
        with _told_as_here(fields):
            check_model(engine, fields.model)
            use = tool_use(fields.tools, fields.tool_choice)
            prompt, _ = await _prompt(engine, exchange, fields, use, must_fit=False)
        await exchange.reply(JsonResponse({"input_tokens": len(prompt)}))

    return handle


@contextmanager
def _told_as_here(fields: PromptFields) -> Iterator[None]:
    """Errors name the fields of this API."""
    try:
        with told_as_asked({"output_config": fields.output_config, "tools": fields.tools}):
            yield
    except InvalidRequestError as error:
        if error.param == "stop":
            error.message = error.message.replace("stop", "stop_sequences", 1)
            error.param = "stop_sequences"
        elif error.param == "prompt":
            error.param = "messages"
        raise


async def _answer(engine: Engine, limits: StreamLimits, exchange: Exchange, fields: MessagesFields) -> None:
    model = check_model(engine, fields.model)
    check_thinking(fields.thinking, fields.max_tokens)
    use = await exchange.work(tool_use, fields.tools, fields.tool_choice)
    params = _params(engine, fields)
    prompt, continues = await _prompt(engine, exchange, fields, use, must_fit=True)
    reading = reading_of(engine, use, prompt, new_id=new_tool_use_id)
    generation = Generation(
        prompts=[prompt],
        params=enforced(params, use, reading),
        stream=bool(fields.stream),
        include_usage=True,
        starts_text=not continues,
        markers=reading.markers,
        priority=exchange.priority_of(None),
        tenant=exchange.tenant,
        lora=adapter_of(engine, model),
        scores_only=fields.max_tokens == 0,
        name=exchange.request_id,
        explained=explained_of(engine, exchange, fields.x_aserve),
    )
    await answer(engine, generation, MessagesWire(exchange.request_id, model, fields, reading), exchange, limits)


def _params(engine: Engine, fields: MessagesFields) -> SamplingParams:
    config = fields.output_config
    format = None if config is None else config.format
    thinks = fields.thinking if engine.info.thought_format is not None else None
    return engine.default_params(
        max_tokens=max(fields.max_tokens, 1),
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=fields.top_k,
        stop=fields.stop_sequences,
        structured=None if format is None else StructuredOutputs(json=format.schema),
        thinking_token_budget=None if thinks is None else thinks.budget_tokens,
    )


async def _prompt(
    engine: Engine, exchange: Exchange, fields: PromptFields, use: ToolUse | None, *, must_fit: bool
) -> tuple[TokenIds, bool]:
    """The conversation in the model's template, and whether the answer goes on with its last message."""
    turns = await exchange.work(turns_of, fields.system, fields.messages)
    continues = turns[-1]["role"] == "assistant"
    prompt = await engine.texts.encode_chat(
        turns,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        hints=thinking_hints(fields.thinking, fields.output_config),
        tools=None if use is None else use.for_template,
        must_fit=must_fit,
    )
    return prompt, continues


class MessagesWire:
    """A message, or the events of which clients make one.

    message_start  ping  (content_block_start  content_block_delta ...  content_block_stop) ...
    message_delta  message_stop
    """

    def __init__(self, request_id: str, model: str, fields: MessagesFields, reading: Reading) -> None:
        self._request_id = request_id
        self._model = model
        self._max_tokens = fields.max_tokens
        self._has_frame = reading.new_parser is None
        omits = fields.thinking is not None and fields.thinking.display == "omitted"
        self._blocks = Blocks(reading, omits_thoughts=omits)
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    def opening(
        self, index: int, prompt_token_ids: TokenIds, prompt_scores: Sequence[TokenScores], usage: Usage | None
    ) -> bytes:
        """The message as it begins, and a ping."""
        start = self._message([], len(prompt_token_ids), 0)
        ping = _event({"type": "ping"})
        return _event({"type": "message_start", "message": start}) + ping + _events(self._blocks.begin())

    def delta(self, delta: TextDelta, usage: Usage | None) -> bytes:
        """What more text comes to, if that is anything."""
        self._note(delta.finish_reason, delta.stop_reason)
        return _events(self._blocks.more(delta.text, delta.finish_reason))

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """Around the text, where an answer is one text."""
        if not self._has_frame:
            return None
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'
        return head + b'{"type":"text_delta","text":', b"}}\n\n"

    def end(self, usage: Usage | None, told: Told = NOTHING) -> bytes:
        """Why it ended, the token counts, and the end."""
        assert usage is not None, "they are always asked for"
        counts = _usage(usage["prompt_tokens"], usage["completion_tokens"])
        change = {"type": "message_delta", "delta": self._reasons(usage["completion_tokens"]), "usage": counts, **told}
        return _event(change) + _event({"type": "message_stop"})

    def failure(self, error: AserveError) -> bytes:
        """The error's object, which ends the stream."""
        return _event(error_object(error, self._request_id))

    def whole(self, completions: Sequence[Completion], usage: Usage) -> dict[str, Any]:
        """The message."""
        [completion] = completions
        self._note(completion.finish_reason, completion.stop_reason)
        pieces = [*self._blocks.begin(), *self._blocks.more(completion.text, completion.finish_reason)]
        message = self._message(content_of(pieces), usage["prompt_tokens"], usage["completion_tokens"])
        return message | self._reasons(usage["completion_tokens"])

    def _note(self, finish_reason: FinishReason | None, stop_reason: int | str | None) -> None:
        self._finish_reason, self._stop_reason = finish_reason, stop_reason

    def _message(self, content: list[dict[str, Any]], num_input: int, num_output: int) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {**_usage(num_input, num_output), "service_tier": "standard"},
        }

    def _reasons(self, num_output: int) -> dict[str, Any]:
        """A length that is not the request's is the context's; a deadline, and an end by the request's id, are nobody's
        word, and tell as a length: a client would take the end of a turn, or a call of a tool, for whole.
        """
        sequence = None
        if self._finish_reason is FinishReason.LENGTH:
            is_cut = self._stop_reason == DEADLINE or num_output >= self._max_tokens
            reason = "max_tokens" if is_cut else "model_context_window_exceeded"
        elif self._finish_reason is FinishReason.ABORT:
            reason = "max_tokens"
        elif isinstance(self._stop_reason, str):
            reason, sequence = "stop_sequence", self._stop_reason
        else:
            reason = "tool_use" if self._blocks.num_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _usage(num_input: int, num_output: int) -> dict[str, int]:
    """Nothing is billed less for being cached: all of the prompt is input."""
    return {
        "input_tokens": num_input,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_output,
    }


def _event(piece: Piece) -> bytes:
    return named_event(piece["type"].encode(), _encode(piece))


def _events(pieces: Sequence[Piece]) -> bytes:
    return b"".join(map(_event, pieces))

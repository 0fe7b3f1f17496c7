"""POST /v1/responses: from a request's items to a response, at once, as a stream, or in the background.

POST /v1/responses/input_tokens counts the prompt's tokens and makes no response.

earlier items + input --> messages --> prompt --> engine --> output --> kept, if it is to be --> told
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import msgspec

from aserve.core.errors import AserveError, ContextLengthError, InvalidRequestError
from aserve.core.params import SamplingParams
from aserve.engine import Engine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.explaining import explained_of
from aserve.http.generation import Generation, Settle, answer
from aserve.http.json_response import JsonResponse
from aserve.http.openai.logprobs import Speller, chat_logprobs
from aserve.http.openai.prompts import check_variables
from aserve.http.openai.responses.background import Job
from aserve.http.openai.responses.items import Item, Messages, input_items, messages_of, new_response_id
from aserve.http.openai.responses.keeping import Kept
from aserve.http.openai.responses.output import Output
from aserve.http.openai.responses.shapes import (
    ENCRYPTED,
    ResponseFields,
    flat_name,
    params_of,
    parse_response,
    tool_use_of,
)
from aserve.http.openai.responses.wire import Response, ResponseWire
from aserve.http.openai.tokens import Tokens
from aserve.http.openai.tools import template_hints
from aserve.http.options import AppOptions
from aserve.http.reading import Reading, enforced, reading_of
from aserve.http.served import adapter_of, check_model
from aserve.http.shapes import told_as_asked
from aserve.http.sse import KEEP_ALIVE, EventStream, StreamLimits
from aserve.http.tally import TokenIds
from aserve.http.tool_use import ToolUse

LARGE_PROMPT: Final = 8192
"""Tokens; the items of one with more are encoded in a thread."""
OTHER_NAMES: Final = ("prompt", "messages")
"""What the engine calls that which this API calls input."""


def create_response(engine: Engine, limits: StreamLimits, kept: Kept, options: AppOptions) -> Handler:
    """The handler of this route."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse_response, exchange.fields)
        with _told_as_here(fields):
            await _create(engine, limits, kept, exchange, fields, options)

    return handle


def count_input_tokens(engine: Engine, kept: Kept) -> Handler:
    """The handler that counts the tokens of what would be the prompt, however long."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse_response, exchange.fields)
        with _told_as_here(fields):
            check_model(engine, fields.model)
            use = await exchange.work(tool_use_of, fields)
            check_variables(engine, exchange.fields, with_tools=use is not None)
            _, prompt = await _read(engine, kept, exchange, fields, use, must_fit=False)
        await exchange.reply(JsonResponse({"object": "response.input_tokens", "input_tokens": len(prompt)}))

    return handle


@contextmanager
def _told_as_here(fields: ResponseFields) -> Iterator[None]:
    """Errors name the fields of this API."""
    try:
        with told_as_asked(fields.structures):
            yield
    except InvalidRequestError as error:
        if error.param in OTHER_NAMES:
            error.param = "input"
        raise


async def _create(
    engine: Engine,
    limits: StreamLimits,
    kept: Kept,
    exchange: Exchange,
    fields: ResponseFields,
    options: AppOptions,
) -> None:
    model = check_model(engine, fields.model)
    tenant = exchange.tenant
    engine.check_room(tenant=tenant, priority=exchange.priority_of(fields.priority), timeout_s=fields.timeout_s)
    use = await exchange.work(tool_use_of, fields)
    check_variables(engine, exchange.fields, with_tools=use is not None)
    params = params_of(engine, fields)
    items, prompt = await _read(engine, kept, exchange, fields, use, must_fit=True)
    reading = reading_of(engine, use, prompt)
    generation = Generation(
        prompts=[prompt],
        params=enforced(params, use, reading, is_of_all=fields.structured_outputs is not None),
        stream=bool(fields.stream or fields.background),
        include_usage=True,
        starts_text=True,
        markers=reading.markers,
        cache_salt=fields.cache_salt or "",
        priority=exchange.priority_of(fields.priority),
        tenant=tenant,
        lora=adapter_of(engine, model),
        timeout_s=fields.timeout_s,
        name=exchange.request_id,
        explained=explained_of(engine, exchange, fields.x_aserve),
    )
    head = _head(fields, model, params)
    wire = ResponseWire(head, _output(engine, fields, reading, options, head["id"]))
    workers = exchange.workers if len(prompt) > LARGE_PROMPT else None
    is_settled = False

    async def settle() -> None:
        nonlocal is_settled
        is_settled = True
        if fields.is_stored:
            response = {**wire.response, **generation.told()} if wire.is_over else wire.response
            await kept.keep(tenant, response, items, workers)

    if fields.background:
        wire.response["status"] = "queued"
        queued, job = wire.response, Job(tenant, wire, settle)
        await _in_background(engine, kept, generation, job, settle)
        reply = followed(job, -1, limits, exchange.request_id) if fields.stream else JsonResponse(queued)
        await exchange.reply(reply)
        return
    await answer(engine, generation, wire, exchange, limits, settle=settle)
    if not is_settled:  # it failed on its way
        await settle()


async def _read(
    engine: Engine, kept: Kept, exchange: Exchange, fields: ResponseFields, use: ToolUse | None, *, must_fit: bool
) -> tuple[list[Item], TokenIds]:
    """All the items that the response answers, and the prompt that they make."""
    given = await exchange.work(input_items, exchange.fields["input"])
    items = await kept.resolved(exchange.tenant, given, exchange.workers)
    if fields.previous_response_id is not None:
        items = [*await kept.history(exchange.tenant, fields.previous_response_id, exchange.workers), *items]
    has_developer = engine.texts.has_role("developer")
    messages = await exchange.work(messages_of, items, fields.instructions, has_developer=has_developer)
    return items, await _prompt(engine, fields, messages, use, must_fit=must_fit)


async def _in_background(engine: Engine, kept: Kept, generation: Generation, job: Job, settle: Settle) -> None:
    """Have it made. Returns when it is kept, as one that waits, and the engine has taken it."""
    await settle()
    try:
        await kept.jobs.start(engine, generation, job)
    except BaseException:
        await kept.forget(job.tenant, job.id)
        raise


def followed(job: Job, after: int, limits: StreamLimits, request_id: str | None) -> EventStream:
    """A stream of a job's events after that number."""
    return EventStream(KEEP_ALIVE, job.follow(after), limits, _nothing, request_id)


def _nothing(_error: AserveError) -> bytes:
    """Whether the response failed is among its events."""
    return b""


async def _prompt(
    engine: Engine, fields: ResponseFields, messages: Messages, use: ToolUse | None, *, must_fit: bool
) -> TokenIds:
    """The conversation in the model's template; with truncation, as much of its end as leaves room for an answer."""
    verbosity = None if fields.text is None else fields.text.verbosity
    max_len = engine.info.max_model_len

    async def encoded(kept: Messages) -> TokenIds:
        return await engine.texts.encode_chat(
            kept,
            variables=fields.chat_template_kwargs or {},
            hints=template_hints(fields.effort, verbosity),
            tools=None if use is None else use.for_template,
            must_fit=must_fit,
        )

    if fields.truncation != "auto":
        return await encoded(messages)
    max_prompt = max_len - min(fields.max_output_tokens or 1, max_len // 2)
    starts = _starts(messages)
    num_pinned = starts[0]
    first, last = 0, len(starts) - 1
    while first < last:  # the first start from which on it fits
        middle = (first + last) // 2
        try:
            fits = len(await encoded([*messages[:num_pinned], *messages[starts[middle] :]])) <= max_prompt
        except ContextLengthError:
            fits = False
        first, last = (first, middle) if fits else (middle + 1, last)
    return await encoded([*messages[:num_pinned], *messages[starts[first] :]])


def _starts(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Where a conversation may begin that is cut: behind the instructions, and not between a call and its output."""
    num_pinned = next(
        (i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), len(messages)
    )
    others = [i for i in range(num_pinned + 1, len(messages)) if messages[i]["role"] != "tool"]
    return [num_pinned, *others]


def _output(engine: Engine, fields: ResponseFields, reading: Reading, options: AppOptions, response_id: str) -> Output:
    skips = fields.skip_special_tokens is not False
    speller = Speller(engine, as_ids=options.return_tokens_as_token_ids, skip_special_tokens=skips)
    token_bytes = partial(engine.token_bytes, skip_special_tokens=skips)
    return Output(
        reading,
        None if reading.new_parser is None else Tokens(token_bytes),
        response_id=response_id,
        names={
            flat_name(namespace, function.name): (namespace, function.name)
            for namespace, function in fields.functions
            if namespace is not None
        },
        spell=(lambda scores: list(chat_logprobs(speller, scores)["content"])) if fields.with_logprobs else None,
        seals=ENCRYPTED in (fields.include or ()),
    )


def _head(fields: ResponseFields, model: str, params: SamplingParams) -> Response:
    """A response before anything of it is made."""
    text = fields.text
    tools = [_tool_told(msgspec.to_builtins(tool)) for tool in fields.tools or ()]
    choice = fields.tool_choice or "auto"
    reasoning = fields.reasoning
    return {
        "id": new_response_id(),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "completed_at": None,
        "background": bool(fields.background),
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": fields.effort, "summary": None if reasoning is None else reasoning.summary},
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default",
        "store": fields.is_stored,
        "temperature": params.temperature,
        "text": {
            "format": {"type": "text"} if text is None or text.format is None else _given(text.format),
            "verbosity": "medium" if text is None else text.verbosity or "medium",
        },
        "tool_choice": choice if isinstance(choice, str) else _given(choice),
        "tools": tools,
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": fields.truncation or "disabled",
        "usage": None,
        "user": fields.user,
    }


def _tool_told(tool: dict[str, Any]) -> dict[str, Any]:
    """With null for what SDKs look for in a function."""
    told = {name: value for name, value in tool.items() if value is not None}
    if tool["type"] == "namespace":
        return told | {"tools": [_tool_told(function) for function in tool["tools"]]}
    return {"description": None, "parameters": None, "strict": None, **told}


def _given(struct: msgspec.Struct) -> dict[str, Any]:
    """As it was given: what was left out is left out."""
    return {name: value for name, value in msgspec.to_builtins(struct).items() if value is not None}

"""POST /tokenize and /detokenize."""

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve.core.errors import InvalidRequestError
from aserve.engine import Engine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.json_response import JsonResponse
from aserve.http.openai.prompts import check_variables
from aserve.http.openai.schema import Messages, parse
from aserve.http.openai.tools import Tools, tool_use
from aserve.http.served import check_model
from aserve.http.shapes import ModelName

OFF_LOOP_TOKENS: Final = 2048
"""Answers of more are written in a thread."""
MESSAGES_ONLY: Final = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a prompt, or messages and the tools that their template is told of.

    add_special_tokens: by default as the two completion routes do.
    """

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None


class DetokenizeFields(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: ModelName | None = None
    tokens: list[int]


def tokenize(engine: Engine) -> Handler:
    """The handler of /tokenize: the tokens that a prompt or a conversation comes to."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, TokenizeFields)
        check_model(engine, fields.model)
        if (fields.prompt is None) == (fields.messages is None):
            raise InvalidRequestError("give either prompt or messages", "prompt")
        if fields.prompt is not None:
            for name in MESSAGES_ONLY:
                _refuse(getattr(fields, name), name, "messages")
            tokens = await engine.encode(fields.prompt, add_special_tokens=fields.add_special_tokens is not False)
        else:
            adds_prompt = fields.add_generation_prompt
            use = await exchange.work(tool_use, fields.tools, None, parallel=None)
            check_variables(engine, exchange.fields, with_tools=use is not None)
            tokens = await engine.texts.encode_chat(
                exchange.fields["messages"],
                add_generation_prompt=not fields.continue_final_message if adds_prompt is None else adds_prompt,
                continue_final_message=bool(fields.continue_final_message),
                variables=fields.chat_template_kwargs or {},
                tools=None if use is None else use.for_template,
                add_special_tokens=bool(fields.add_special_tokens),
            )

        def response() -> JsonResponse:
            body = {
                "count": len(tokens),
                "max_model_len": engine.info.max_model_len,
                "tokens": tokens,
                "token_strs": engine.token_strings(tokens) if fields.return_token_strs else None,
            }
            return JsonResponse(body)

        is_long = len(tokens) > OFF_LOOP_TOKENS
        await exchange.reply(await exchange.workers.run(response) if is_long else response())

    return handle


def detokenize(engine: Engine) -> Handler:
    """The handler of /detokenize: the text of tokens, special ones included."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, DetokenizeFields)
        check_model(engine, fields.model)
        text = await engine.decode(fields.tokens)
        await exchange.reply(JsonResponse({"prompt": text}))

    return handle


def tokenizer_info_route(engine: Engine) -> Route:
    """GET /tokenizer_info: what the tokenizer's configuration says."""

    async def show(_request: Request) -> Response:
        return JsonResponse(engine.texts.tokenizer_info())

    return Route("/tokenizer_info", show)


def _refuse(value: object, field: str, other: str) -> None:
    if value is not None:
        raise InvalidRequestError(f"{field} goes with {other} only", field)

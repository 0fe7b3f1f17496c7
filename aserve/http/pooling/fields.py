"""What the requests of all these routes have in common: their fields, their inputs, and the terms they come on."""

import base64
import difflib
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.core.pooling import InputTerms, Pooled, PoolingParams, TokenizedInput
from aserve.core.request import CACHE_SALT, REQUEST_ID, SharedTerms
from aserve.engine import Engine
from aserve.http.endpoint import Exchange
from aserve.http.errors import echo
from aserve.http.json_response import JsonResponse
from aserve.http.served import check_model
from aserve.http.shapes import ModelName, converted

MAX_INPUTS: Final = 2048
"""Of a request."""
OFF_LOOP_NUMBERS: Final = 16 * 1024
"""Answers with more are written in a thread."""
WITHOUT_EFFECT: Final = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})
"""Accepted and not looked at: the answer is the same with and without them."""

EncodingFormat = Literal["float", "base64"]
Usage = dict[str, Any]


class PoolingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests may say."""

    model: ModelName | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128, pattern=CACHE_SALT.pattern)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    request_id: Annotated[str, Meta(pattern=REQUEST_ID.pattern)] | None = None
    timeout_s: float | None = None

    @property
    def input_terms(self) -> InputTerms:
        """How inputs become tokens."""
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens must be -1, or at least 1, got 0", "truncate_prompt_tokens"
            )
        return {
            "add_special_tokens": self.add_special_tokens is not False,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "truncation_side": self.truncation_side or "right",
        }


Fields = TypeVar("Fields", bound=PoolingFields)


def parse(raw: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """The fields of a request. Raises `InvalidRequestError` naming the one that is wrong, or unknown."""
    known = (*kind.__struct_fields__, *WITHOUT_EFFECT)
    for name in raw:
        if name not in known:
            raise InvalidRequestError(f"unknown field {echo(name)[1:-1]}{_hint(name, known)}", echo(name)[1:-1])
    return converted(raw, kind)


def _hint(name: str, known: Sequence[str]) -> str:
    """What may have been meant by a field that is unknown."""
    if name == "messages" and "input" in known:
        return "; a conversation is given in input, as the text that it is to be read as"
    nearest = difflib.get_close_matches(name, known, n=1) if len(name) <= 64 else []
    return f"; did you mean {nearest[0]}?" if nearest else ""


def several(value: Any, name: str) -> list[Any]:
    """An input, or a list of them, as a list, with its bounds checked; token ids are one input."""
    if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int)):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(f"{name} must be a text, a list of token ids, or a list of either, not empty", name)
    if len(value) > MAX_INPUTS:
        raise InvalidRequestError(f"{name}: at most {MAX_INPUTS} are taken at a time, got {len(value)}", name)
    return value


def named(values: Sequence[object], name: str, *, is_list: bool = True) -> list[str]:
    """What each of several inputs is called in errors."""
    return [f"{name}[{index}]" for index in range(len(values))] if is_list else [name]


async def tokens_of(engine: Engine, exchange: Exchange, fields: PoolingFields, value: Any) -> list[TokenizedInput]:
    """The inputs of the field `input`, tokenized."""
    inputs = await exchange.work(_checked_inputs, value)
    is_list = isinstance(value, list) and not isinstance(value[0], int)
    return await engine.texts.encode_inputs(inputs, named(inputs, "input", is_list=is_list), **fields.input_terms)


def _checked_inputs(value: Any) -> list[str | list[int]]:
    inputs = several(value, "input")
    for index, one in enumerate(inputs):
        is_ids = isinstance(one, list) and all(type(token_id) is int for token_id in one)
        if not isinstance(one, str) and not is_ids:
            raise InvalidRequestError(f"input[{index}] must be a text or a list of token ids", "input")
    return inputs


def settled(engine: Engine, fields: PoolingFields, exchange: Exchange) -> str:
    """The model's name for the answer, once it is sure that the request would be taken. Raises as `check_room`."""
    model = check_model(engine, fields.model)
    _ = engine.pooling
    terms = terms_of(fields, exchange)
    engine.check_room(tenant=exchange.tenant, priority=terms["priority"], timeout_s=terms["timeout_s"])
    return model


def terms_of(fields: PoolingFields, exchange: Exchange) -> SharedTerms:
    """On what terms each input is computed."""
    return {
        "cache_salt": fields.cache_salt or "",
        "priority": exchange.priority_of(fields.priority),
        "timeout_s": fields.timeout_s,
        "tenant": exchange.tenant,
    }


async def pooled(
    engine: Engine, exchange: Exchange, fields: PoolingFields, inputs: Sequence[TokenizedInput], params: PoolingParams
) -> list[Pooled]:
    """What the model makes of all inputs; the access log hears of their tokens."""
    outputs = await engine.pool_all(inputs, params, **terms_of(fields, exchange))
    exchange.record.usage = lambda: usage_of(outputs)
    return outputs


def usage_of(outputs: Sequence[Pooled]) -> Usage:
    """The token counts of an answer."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "prompt_tokens": num_tokens,
        "total_tokens": num_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def encoded(values: "array[float]", encoding_format: EncodingFormat) -> list[float] | str:
    """A vector as JSON has it: numbers, or the base64 of little-endian float32."""
    if encoding_format == "float":
        return values.tolist()
    if sys.byteorder == "big":
        values = array("f", values)
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


async def reply(
    exchange: Exchange,
    model: str,
    prefix: str,
    outputs: Sequence[Pooled],
    data: Callable[[], Sequence[Mapping[str, Any]]],
) -> None:
    """Answer with a list of objects."""

    def response() -> JsonResponse:
        body = {
            "id": f"{prefix}-{exchange.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data(),
            "usage": usage_of(outputs),
        }
        return JsonResponse(body)

    is_long = sum(len(output.values) for output in outputs) > OFF_LOOP_NUMBERS
    await exchange.reply(await exchange.workers.run(response) if is_long else response())

"""POST /v1/embeddings, and POST /pooling, which answers with whatever the model makes of an input."""

from typing import Any, Final, Literal

from aserve.core.errors import InvalidRequestError
from aserve.core.pooling import PoolingParams
from aserve.engine import Engine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.pooling.fields import (
    EncodingFormat,
    PoolingFields,
    encoded,
    parse,
    pooled,
    reply,
    settled,
    tokens_of,
)


class EmbeddingFields(PoolingFields, frozen=True, kw_only=True):
    """POST /v1/embeddings. input: a text, token ids, or a list of either."""

    input: Any
    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None


class PoolFields(EmbeddingFields, frozen=True, kw_only=True):
    """POST /pooling. task: that of the model."""

    task: Literal["embed", "classify", "reward"] | None = None


PREFIXES: Final = {"embedding": "embd", "pooling": "pool"}


def embeddings(engine: Engine) -> Handler:
    """The handler of /v1/embeddings."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, EmbeddingFields)
        model = settled(engine, fields, exchange)
        engine.check_task("embed")
        await _answer(engine, exchange, fields, model, "embedding", "embedding")

    return handle


def pooling(engine: Engine) -> Handler:
    """The handler of /pooling."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, PoolFields)
        model = settled(engine, fields, exchange)
        if fields.task is not None:
            engine.check_task(fields.task)
        await _answer(engine, exchange, fields, model, "pooling", "data")

    return handle


async def _answer(
    engine: Engine, exchange: Exchange, fields: EmbeddingFields, model: str, kind: str, member: str
) -> None:
    if fields.dimensions is not None and fields.dimensions < 1:
        raise InvalidRequestError(f"dimensions must be at least 1, got {fields.dimensions}", "dimensions")
    params = PoolingParams(dimensions=fields.dimensions, use_activation=fields.use_activation)
    engine.check_pooling(params)
    inputs = await tokens_of(engine, exchange, fields, fields.input)
    outputs = await pooled(engine, exchange, fields, inputs, params)

    def data() -> list[dict[str, Any]]:
        return [
            {"object": kind, "index": index, member: encoded(output.values, fields.encoding_format)}
            for index, output in enumerate(outputs)
        ]

    await reply(exchange, model, PREFIXES[kind], outputs, data)

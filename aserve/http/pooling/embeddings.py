"""POST /v1/embeddings, and POST /pooling, which answers with whatever the model makes of an input."""

from typing import Any, Final, Literal

from aserve.core.errors import InvalidRequestError
from aserve.core.pooling import Pooled, PoolingParams, PoolingTask
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
    """POST /pooling. task: that of the model; with token_ before it, of each token."""

    task: Literal["embed", "classify", "reward", "token_embed", "token_classify"] | None = None


TASKS: Final[dict[str, tuple[PoolingTask, ...]]] = {
    "embed": ("embed",),
    "classify": ("classify",),
    "reward": ("reward",),
    "token_embed": ("embed",),
    "token_classify": ("classify", "reward"),
}
"""With what a model is served for that does them."""
MAX_NUMBERS: Final = 2**22
"""Of the vectors of all tokens of a request."""
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
            engine.check_task(*TASKS[fields.task])
        per_token = fields.task in ("token_embed", "token_classify")
        await _answer(engine, exchange, fields, model, "pooling", "data", per_token=per_token)

    return handle


async def _answer(
    engine: Engine,
    exchange: Exchange,
    fields: EmbeddingFields,
    model: str,
    kind: str,
    member: str,
    *,
    per_token: bool = False,
) -> None:
    if fields.dimensions is not None and fields.dimensions < 1:
        raise InvalidRequestError(f"dimensions must be at least 1, got {fields.dimensions}", "dimensions")
    params = PoolingParams(dimensions=fields.dimensions, use_activation=fields.use_activation, per_token=per_token)
    engine.check_pooling(params)
    inputs = await tokens_of(engine, exchange, fields, fields.input)
    num_tokens = sum(len(tokens.token_ids) for tokens in inputs)
    if per_token and num_tokens * engine.pooling.size > MAX_NUMBERS:
        raise InvalidRequestError(
            f"input: {num_tokens} vectors of {engine.pooling.size} numbers are over the limit of {MAX_NUMBERS} numbers",
            "input",
        )
    outputs = await pooled(engine, exchange, fields, inputs, params)

    def data() -> list[dict[str, Any]]:
        return [
            {"object": kind, "index": index, member: _encoded(output, fields.encoding_format, per_token=per_token)}
            for index, output in enumerate(outputs)
        ]

    await reply(exchange, model, PREFIXES[kind], outputs, data)


def _encoded(
    output: Pooled, encoding_format: EncodingFormat, *, per_token: bool
) -> list[float] | list[list[float]] | str:
    """As numbers a list of vectors where each token has one; as base64 one behind the other."""
    if not per_token or encoding_format == "base64":
        return encoded(output.values, encoding_format)
    size = len(output.values) // output.num_vectors
    return [output.values[start : start + size].tolist() for start in range(0, len(output.values), size)]

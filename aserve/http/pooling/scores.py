"""POST /score and /rerank: how well documents answer a query, in their order or the best first.

The shapes are vLLM's; those of /rerank are also Jina's and Cohere's.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final

from msgspec import Meta

from aserve.core.errors import InvalidRequestError
from aserve.core.pooling import Pooled, PoolingParams, cosine
from aserve.engine import Engine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.json_response import JsonResponse
from aserve.http.pooling.fields import PoolingFields, named, parse, pooled, reply, settled, several, usage_of

SIDES: Final = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
"""Names of the two fields of /score: any of these pairs."""
TEXT_OBJECT: Final = "must be a text, or an object with a text"

Texts = Any


class ScoringFields(PoolingFields, frozen=True, kw_only=True):
    """What both requests may say. instruction, chat_template_kwargs: variables of a template that was given."""

    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Of the template."""
        given = dict(self.chat_template_kwargs or {})
        return given if self.instruction is None else {"instruction": self.instruction} | given


class ScoreFields(ScoringFields, frozen=True, kw_only=True):
    """POST /score: one query for all documents, or one each, under any of the names in SIDES."""

    queries: Texts = None
    documents: Texts = None
    items: Texts = None
    text_1: Texts = None
    text_2: Texts = None
    data_1: Texts = None
    data_2: Texts = None


class RerankFields(ScoringFields, frozen=True, kw_only=True):
    """POST /rerank. top_n: how many of the best are told; 0 and more than there are is all."""

    query: Texts
    documents: Texts
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    return_documents: bool = True


def score(engine: Engine) -> Handler:
    """The handler of /score."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, ScoreFields)
        model = settled(engine, fields, exchange)
        one, other = _sides(fields)
        queries = _texts(getattr(fields, one), one)
        documents = _texts(getattr(fields, other), other)
        if len(queries) not in (1, len(documents)):
            raise InvalidRequestError(
                f"{one} must be one text, or as many as {other} ({len(documents)}), got {len(queries)}", one
            )
        scores, outputs = await _scores(engine, exchange, fields, (one, queries), (other, documents))
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        await reply(exchange, model, "score", outputs, lambda: data)

    return handle


def rerank(engine: Engine) -> Handler:
    """The handler of /rerank."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, RerankFields)
        model = settled(engine, fields, exchange)
        queries, documents = _texts(fields.query, "query"), _texts(fields.documents, "documents")
        if len(queries) != 1:
            raise InvalidRequestError(f"query must be one text, got {len(queries)}", "query")
        scores, outputs = await _scores(engine, exchange, fields, ("query", queries), ("documents", documents))
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.top_n or None]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": documents[index]}} if fields.return_documents else {})
            for index in best
        ]
        usage = usage_of(outputs)
        body = {"id": f"rerank-{exchange.request_id}", "model": model, "results": results, "usage": usage}
        await exchange.reply(JsonResponse(body))

    return handle


def _sides(fields: ScoreFields) -> tuple[str, str]:
    """The two fields that were given. Raises `InvalidRequestError` unless they are one pair of SIDES."""
    names = [name for name in dict.fromkeys(sum(SIDES, ())) if getattr(fields, name) is not None]
    for pair in SIDES:
        if set(pair) == set(names):
            return pair
    raise InvalidRequestError(
        f"give queries and documents, or text_1 and text_2; got {', '.join(names) or 'neither'}", "queries"
    )


def _texts(value: Texts, name: str) -> list[str]:
    """Texts, each a string or an object with one."""
    found = []
    for index, one in enumerate(several([value] if isinstance(value, dict) else value, name)):
        text = one.get("text") if isinstance(one, dict) else one
        if not isinstance(text, str):
            raise InvalidRequestError(f"{name}[{index}] {TEXT_OBJECT}", name)
        found.append(text)
    return found


async def _scores(
    engine: Engine,
    exchange: Exchange,
    fields: ScoringFields,
    side: tuple[str, Sequence[str]],
    other_side: tuple[str, Sequence[str]],
) -> tuple[list[float], list[Pooled]]:
    """The score of each document for its query, and what they were made of."""
    (name, queries), (other, documents) = side, other_side
    params = PoolingParams(use_activation=fields.use_activation)
    if engine.pooling.task == "embed":
        if fields.variables:
            raise InvalidRequestError(
                "instruction is for models that read both texts, and this one embeds", "instruction"
            )
        texts, names = [*queries, *documents], named(queries, name) + named(documents, other)
        inputs = await engine.texts.encode_inputs(texts, names, **fields.input_terms)
        outputs = await pooled(engine, exchange, fields, inputs, params)
        one_each = outputs[: len(queries)] * (len(documents) if len(queries) == 1 else 1)
        pairs = zip(one_each, outputs[len(queries) :], strict=True)
        return [cosine(query.values, document.values) for query, document in pairs], outputs
    engine.check_scores_pairs()
    each = list(queries) * (len(documents) if len(queries) == 1 else 1)
    texts_of_pairs = list(zip(each, documents, strict=True))
    inputs = await engine.texts.encode_pairs(
        texts_of_pairs, named(documents, other), variables=fields.variables, **fields.input_terms
    )
    outputs = await pooled(engine, exchange, fields, inputs, params)
    return [output.values[0] for output in outputs], outputs

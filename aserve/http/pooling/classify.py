"""POST /classify: the probability of each label."""

from typing import Any

from aserve.core.pooling import PoolingParams
from aserve.engine import Engine
from aserve.http.endpoint import Exchange, Handler
from aserve.http.pooling.fields import PoolingFields, parse, pooled, reply, settled, tokens_of


class ClassifyFields(PoolingFields, frozen=True, kw_only=True):
    """POST /classify. input: as in /v1/embeddings."""

    input: Any


def classify(engine: Engine) -> Handler:
    """The handler of this route."""

    async def handle(exchange: Exchange) -> None:
        fields = await exchange.work(parse, exchange.fields, ClassifyFields)
        model = settled(engine, fields, exchange)
        engine.check_task("classify", "reward")
        params = PoolingParams(use_activation=fields.use_activation)
        outputs = await pooled(
            engine, exchange, fields, await tokens_of(engine, exchange, fields, fields.input), params
        )
        labels = engine.pooling.labels

        def data() -> list[dict[str, Any]]:
            return [
                {
                    "index": index,
                    "label": labels[max(range(len(labels)), key=output.values.__getitem__)] if labels else None,
                    "probs": output.values.tolist(),
                    "num_classes": len(output.values),
                }
                for index, output in enumerate(outputs)
            ]

        await reply(exchange, model, "classify", outputs, data)

    return handle

"""GET /v1/models and /v1/models/{id}: the names of the model, and its adapters, and what they are for."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve.engine import Engine
from aserve.http.json_response import JsonResponse
from aserve.http.served import check_model


def model_routes(engine: Engine) -> list[Route]:
    """Both routes. Every name has a card of its own."""

    async def list_models(_request: Request) -> Response:
        names = (*engine.info.names, *engine.adapters.folders())
        return JsonResponse({"object": "list", "data": [_card(engine, name) for name in names]})

    async def get_model(request: Request) -> Response:
        name = request.path_params["model"].replace("%2F", "/")  # kept so by the guard; see HeadCheck
        return JsonResponse(_card(engine, check_model(engine, name)))

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", get_model),  # names of models have slashes: Qwen/Qwen3-0.6B
    ]


def _card(engine: Engine, name: str) -> dict[str, Any]:
    """An adapter's names the model that it changes."""
    info = engine.info
    is_adapter = name not in info.names
    return {
        "id": name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "aserve",
        "root": engine.adapters.folders()[name] if is_adapter else info.root,
        "parent": info.names[0] if is_adapter else None,
        "max_model_len": info.max_model_len,
        "task": "generate" if info.pooling is None else info.pooling.task,
        "permission": [],
    }

"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve.core.config import ModelInfo
from aserve.engine import Engine
from aserve.http.json_response import JsonResponse
from aserve.http.openai.schema import check_model


def model_routes(engine: Engine) -> list[Route]:
    """Both routes. Every name of the model has a card of its own."""

    async def list_models(_request: Request) -> Response:
        info = engine.info
        return JsonResponse({"object": "list", "data": [_card(info, name) for name in info.names]})

    async def get_model(request: Request) -> Response:
        info = engine.info
        name = request.path_params["model"].replace("%2F", "/")  # kept so by the guard; see HeadCheck
        return JsonResponse(_card(info, check_model(info, name)))

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/{model:path}", get_model),  # names of models have slashes: Qwen/Qwen3-0.6B
    ]


def _card(info: ModelInfo, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": info.created_s,
        "owned_by": "aserve",
        "root": info.root,
        "parent": None,
        "max_model_len": info.max_model_len,
        "permission": [],
    }

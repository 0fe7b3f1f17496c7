"""What operators ask: is it alive, is it ready, which version, how does it do. Answered while the model loads, too."""

from typing import Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve import __version__
from aserve.core.errors import UnavailableError
from aserve.engine import Engine, EngineState
from aserve.http.json_response import JsonResponse
from aserve.http.keys import tenant_of

LEAVING_KEY: Final = "aserve.leaving"
"""Where, in the scope's "state", a server puts what says whether it is about to end."""


def ops_routes(engine: Engine) -> list[Route]:
    """/health, /ping, /ready, /version, /metrics, /v1/usage, /load and /reset_prefix_cache."""

    async def health(_request: Request) -> Response:
        """200 unless only a restart can help."""
        if engine.state in (EngineState.DEAD, EngineState.CLOSED):
            raise UnavailableError(f"the engine is {engine.state.value}")
        return JsonResponse({"status": engine.state.value})

    async def ready(request: Request) -> Response:
        """200 when requests are asked for: not while the server prepares to end, though it takes them still."""
        if request.scope.get("state", {}).get(LEAVING_KEY, _never)():
            raise UnavailableError("the server is about to end")
        if engine.state is not EngineState.READY:
            raise UnavailableError(f"the engine is {_stage(engine)}")
        return JsonResponse({"status": engine.state.value})

    async def version(_request: Request) -> Response:
        return JsonResponse({"version": __version__})

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(engine.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def reset_prefix_cache(_request: Request) -> Response:
        """Those who run keep what they have; the answer says how many blocks nobody will find any more."""
        return JsonResponse({"num_blocks": engine.reset_prefix_cache()})

    return [
        Route("/health", health),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/ready", ready),
        Route("/version", version),
        Route("/metrics", metrics),
        *_account_routes(engine),
        Route("/reset_prefix_cache", reset_prefix_cache, methods=["POST"]),
    ]


def _account_routes(engine: Engine) -> list[Route]:
    async def usage(request: Request) -> Response:
        """What the tenant whose key it is has used since the start, and what it has left."""
        tenant = tenant_of(request.scope)
        used = msgspec.structs.asdict(engine.tenants.account(tenant).usage())
        limits = {name: msgspec.structs.asdict(left) for name, left in engine.tenants.allowances(tenant).items()}
        return JsonResponse({"object": "usage", **used, "limits": limits})

    async def load(_request: Request) -> Response:
        """How many requests are open, of all tenants."""
        return JsonResponse({"server_load": sum(usage.num_open for usage in engine.tenants.usages())})

    return [Route("/v1/usage", usage), Route("/load", load)]


def _never() -> bool:
    return False


def _stage(engine: Engine) -> str:
    """Such as "loading: weights 43%"."""
    if engine.state is not EngineState.LOADING:
        return str(engine.state.value)
    progress = engine.progress
    parts = f" {progress.done / progress.total:.0%}" if progress.total else ""
    return f"{engine.state.value}: {progress.stage}{parts}"

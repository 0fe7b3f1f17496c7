"""What is asked of a response later: itself, its events, its input's items, its end, its deletion."""

from typing import Final

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from aserve.core.errors import InvalidRequestError
from aserve.http.connection import while_connected
from aserve.http.endpoint import Reply
from aserve.http.errors import echo
from aserve.http.json_response import JsonResponse
from aserve.http.keys import tenant_of
from aserve.http.openai.responses.create import followed
from aserve.http.openai.responses.keeping import Kept
from aserve.http.paging import Page, number
from aserve.http.request_id import SCOPE_KEY
from aserve.http.sse import StreamLimits

PATH: Final = "/v1/responses/{response_id}"


def later_routes(kept: Kept, limits: StreamLimits) -> list[Route]:
    """The routes of one response."""

    async def cancel(request: Request) -> Response:
        tenant, id = tenant_of(request.scope), request.path_params["response_id"]
        response = await kept.response(tenant, id)
        if not response["background"]:
            raise InvalidRequestError("only a response that is made in the background can be cancelled")
        if (job := kept.jobs.running(tenant, id)) is not None:
            await job.cancel()
        return JsonResponse(await kept.response(tenant, id))

    async def items(request: Request) -> Response:
        page = Page(request.query_params)
        found = await kept.items(tenant_of(request.scope), request.path_params["response_id"])
        return JsonResponse(page.of(found, "item"))

    return [
        Route(PATH, OneResponse(kept, limits), methods=["GET", "DELETE"]),
        Route(f"{PATH}/cancel", cancel, methods=["POST"]),
        Route(f"{PATH}/input_items", items),
    ]


class OneResponse:
    """An ASGI application: GET, with ?stream=true from a response's events on, and DELETE."""

    def __init__(self, kept: Kept, limits: StreamLimits) -> None:
        self._kept = kept
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        reply = Reply(scope, receive, send, dict)
        tenant, id = tenant_of(scope), scope["path_params"]["response_id"]
        query = QueryParams(scope["query_string"])
        if scope["method"] == "DELETE":
            await self._kept.forget(tenant, id)
            await reply(JsonResponse({"id": id, "object": "response", "deleted": True}))
        elif _flag(query, "stream"):
            after = number(query, "starting_after", -1, at_least=0)
            job = self._kept.jobs.followable(tenant, id)
            if job is None:
                await self._kept.response(tenant, id)
                raise InvalidRequestError(
                    "the events of this response are not kept: it was not made in the background, or has long ended",
                    "stream",
                )
            async with while_connected(receive):
                await reply(followed(job, after, self._limits, scope[SCOPE_KEY]))
        else:
            if "starting_after" in query:
                raise InvalidRequestError("starting_after is for streams: set stream to true", "starting_after")
            await reply(JsonResponse(await self._kept.response(tenant, id)))


def _flag(query: QueryParams, name: str) -> bool:
    value = query.get(name, "false").lower()
    if value not in ("true", "false"):
        raise InvalidRequestError(f"{name} must be true or false, got {echo(value)}", name)
    return value == "true"

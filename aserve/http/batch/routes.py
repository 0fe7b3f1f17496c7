"""/v1/batches, as OpenAI has it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve.core.errors import InvalidRequestError
from aserve.http.batch.batches import Batches, State
from aserve.http.batch.files import file_of
from aserve.http.endpoint import Exchange, Handler
from aserve.http.errors import HttpError, echo
from aserve.http.json_response import JsonResponse
from aserve.http.keys import tenant_of
from aserve.http.paging import Page
from aserve.http.shapes import check_names, converted

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class BatchFields(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: Any = None


def create_batch(batches: Batches) -> Handler:
    """The handler of POST /v1/batches."""

    async def handle(exchange: Exchange) -> None:
        fields = converted(exchange.fields, BatchFields)
        check_names(exchange.fields, fields)
        if fields.endpoint not in batches.urls:
            raise InvalidRequestError(
                f"endpoint must be one of {', '.join(batches.urls)}, got {echo(fields.endpoint)}", "endpoint"
            )
        if fields.output_expires_after is not None:
            told = "output_expires_after: files are kept until they are deleted"
            raise InvalidRequestError(told, "output_expires_after")
        file = await file_of(batches.store, exchange.tenant, fields.input_file_id)
        state = await batches.create(exchange.tenant, fields.endpoint, file.id, fields.metadata)
        await exchange.reply(JsonResponse(state))

    return handle


def batch_routes(batches: Batches) -> list[Route]:
    """The others."""

    async def list_batches(request: Request) -> Response:
        page = Page(request.query_params)
        found = await batches.told(tenant_of(request.scope))
        return JsonResponse(page.of(found[::-1], "batch"))

    async def get_batch(request: Request) -> Response:
        return JsonResponse(await _asked(request))

    async def cancel(request: Request) -> Response:
        state = await _asked(request)
        await batches.cancel(tenant_of(request.scope), state["id"])
        return JsonResponse(await _asked(request))

    async def _asked(request: Request) -> State:
        id = request.path_params["batch_id"]
        for state in await batches.told(tenant_of(request.scope)):
            if state["id"] == id:
                return state
        raise HttpError(404, "batch_not_found", f"there is no batch {echo(id)}")

    return [
        Route("/v1/batches", list_batches),
        Route("/v1/batches/{batch_id}", get_batch),
        Route("/v1/batches/{batch_id}/cancel", cancel, methods=["POST"]),
    ]

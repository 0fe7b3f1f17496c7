"""GET /v1/requests/{id}: where a request's time goes, or went, as core/explanation.py has it; DELETE ends the request.

The id is the engine's, what the client calls the request (X-Request-Id), or that of the answer. Who has a key sees the
requests of his own tenant, and no others: they are unknown to him.
"""

import re
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve.core.explanation import Explanation
from aserve.engine import Engine
from aserve.http.errors import HttpError, echo
from aserve.http.json_response import JsonResponse
from aserve.http.keys import tenant_of
from aserve.observe.explainer import MAX_KEPT

PATH: Final = "/v1/requests/{request_id}"
HOW: Final = f'ask with "x_aserve": {{"explain": true}}; the last {MAX_KEPT} such requests that have ended are kept'
_OF_ANSWER: Final = re.compile(r"(?:chatcmpl-|cmpl-|msg_)(.+)")


def request_routes(engine: Engine) -> list[Route]:
    """The routes."""

    def find(request: Request) -> Explanation:
        name, tenant = request.path_params["request_id"], tenant_of(request.scope)
        found = engine.observer.find(name, tenant)
        if found is None and (answer := _OF_ANSWER.fullmatch(name)) is not None:
            found = engine.observer.find(answer[1], tenant)
        if found is None:
            raise HttpError(404, "request_not_found", f"no request {echo(name)} is known: {HOW}")
        return found

    async def show(request: Request) -> Response:
        return JsonResponse(msgspec.to_builtins(find(request)))

    async def end(request: Request) -> Response:
        """Who waits for it gets what there is, and the finish reason "abort"."""
        found = find(request)
        if not engine.abort(found.id):
            raise HttpError(409, "request_not_open", f"request {echo(found.id)} has ended, or has not begun")
        return JsonResponse({"id": found.id, "object": "request", "aborted": True})

    return [Route(PATH, show), Route(PATH, end, methods=["DELETE"])]

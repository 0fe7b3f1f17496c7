"""Whole: what is asked of the service and not of one replica, put together of what all of them say.

    /health /ping /ready       how each is: 200 where one is alive, or ready
    /metrics                   of each, with its name as the label `replica`
    /load /v1/usage ...        numbers, added up
    /v1/files /v1/batches      lists, one after another
    /v1/load_lora_adapter ...  done by all; the first that fails answers
    /v1/responses/{id} ...     kept by one: asked in turn until one knows it

The names of replicas are those of the header X-Aserve-Replica.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from aserve.core.errors import AserveError, UnavailableError
from aserve.http.errors import error_response
from aserve.http.json_response import JsonResponse
from aserve.ray.carried import Carried, Whole
from aserve.ray.engine_replica import Health
from aserve.ray.metric_texts import merged
from aserve.ray.replicas import Replicas

ALIVE: Final = frozenset({"loading", "ready", "draining"})
SUMMED: Final = frozenset({("GET", "/load"), ("GET", "/v1/usage"), ("POST", "/reset_prefix_cache")})
DONE_BY_ALL: Final = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
LISTS: Final = frozenset({"/v1/files", "/v1/batches"})
KEPT: Final = ("/v1/responses/", "/v1/requests/", "/v1/files/", "/v1/batches/")
"""Below these paths is what one replica keeps."""

Answerer = Callable[[], Any]


class WholeService:
    """Of all replicas. For each method an `Answerer`; None is one replica's business."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def answerer(self, carried: Carried) -> Answerer | None:
        """Who answers a request that concerns all; None where one replica does."""
        method, path = carried.method, carried.path
        if path in ("/health", "/ping"):
            return lambda: self._state(ALIVE, "no replica is alive")
        if method == "GET" and path == "/ready":
            return lambda: self._state(frozenset({"ready"}), "no replica is ready")
        if method == "GET" and path == "/metrics":
            return self._metrics
        if (method, path) in SUMMED:
            return lambda: self._joined(carried, summed)
        if method == "GET" and path in LISTS:
            return lambda: self._joined(carried, listed)
        if path in DONE_BY_ALL:
            return lambda: self._joined(carried, lambda bodies: bodies[0])
        return None

    async def answer(self, answerer: Answerer, carried: Carried) -> Response:
        """The answer, errors included."""
        try:
            response: Response = await answerer()
        except AserveError as error:
            return error_response(error, carried.request_id)
        return response

    async def names(self) -> list[str]:
        """Of the replicas that answer now."""
        return [each.replica for each in await self._replicas.of_all("health")]

    async def model_names(self) -> frozenset[str]:
        """Those of the model itself, as replicas tell that have it."""
        return frozenset(name for each in await self._replicas.of_all("health") for name in each.model_names)

    async def _state(self, good: frozenset[str], otherwise: str) -> Response:
        found: Sequence[Health] = await self._replicas.of_all("health")
        if not any(each.state in good for each in found):
            raise UnavailableError(otherwise)
        status = "ready" if any(each.state == "ready" for each in found) else found[0].state
        return JsonResponse({"status": status, "replicas": sorted(found, key=lambda each: each.replica)})

    async def _metrics(self) -> Response:
        texts: Sequence[tuple[str, str]] = await self._replicas.of_all("metrics")
        content = await asyncio.to_thread(merged, sorted(texts))
        return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _joined(self, carried: Carried, join: Callable[[list[Any]], Any]) -> Response:
        """One body of those of all; the answer that is none, where there is one."""
        answers: Sequence[Whole] = await self._replicas.of_all("answer", carried)
        if not answers:
            raise UnavailableError("no replica could answer")
        failed = next((each for each in answers if each.status >= 400), None)
        if failed is not None or not answers[0].body.startswith(b"{"):
            chosen = failed or answers[0]
            response = Response(chosen.body, status_code=chosen.status)
            response.raw_headers[:] = [pair for pair in chosen.headers if pair[0] != b"x-request-id"]
            return response
        return JsonResponse(join([msgspec.json.decode(each.body) for each in answers]))


def is_kept(carried: Carried) -> bool:
    """Whether a request is of something that one replica keeps, so that another says 404."""
    if carried.path.startswith(KEPT) or (carried.method == "POST" and carried.path == "/v1/batches"):
        return True
    return carried.method == "POST" and carried.path == "/v1/responses" and b'"previous_response_id"' in carried.body


def summed(bodies: list[Any]) -> Any:
    """Numbers added up, by name and however deep; of all else the first."""
    first = bodies[0]
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for body in bodies for name in body)
        return {name: summed([body[name] for body in bodies if name in body]) for name in names}
    if isinstance(first, bool) or not isinstance(first, int | float):
        return first
    return sum(bodies)


def listed(bodies: list[Any]) -> Any:
    """One list of all, the newest first."""
    data = [each for body in bodies for each in body.get("data", ())]
    data.sort(key=lambda each: each.get("created_at", 0), reverse=True)
    ends = {"first_id": data[0].get("id"), "last_id": data[-1].get("id")} if data else {}
    return {**bodies[0], **ends, "data": data, "has_more": any(body.get("has_more") for body in bodies)}

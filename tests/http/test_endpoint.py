"""The edge of a request's task: a handler of ours that fails costs one request a 500, and says nothing."""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from aserve.http.endpoint import JsonEndpoint
from aserve.http.request_id import RequestIds
from tests.http.conftest import client_of


async def test_a_bug_in_a_handler(engine, caplog):
    async def handle(exchange):
        raise LookupError(exchange.fields["prompt"])

    routes = [Route("/", JsonEndpoint(engine, handle), methods=["POST"])]
    async with client_of(Starlette(routes=routes, middleware=[Middleware(RequestIds)])) as client:
        response = await client.post("/", json={"prompt": "secret"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "server_error"
    assert "LookupError" in caplog.text
    assert "secret" not in caplog.text + response.text

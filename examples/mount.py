"""Mount aserve's OpenAI API inside a Starlette or FastAPI application of your own.

Run it with any ASGI server, for example: hypercorn examples.mount:app
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from aserve import AsyncEngine
from aserve.http import create_app

engine = AsyncEngine("demo")


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    async with engine:
        yield


async def home(_: Request) -> PlainTextResponse:
    completion = await engine.complete_chat([{"role": "user", "content": "Hello!"}])
    return PlainTextResponse(completion.text)


app = Starlette(routes=[Route("/", home), Mount("/llm", create_app(engine))], lifespan=lifespan)

"""AppOptions: what an operator decides of the API, and how the decisions reach the requests.

CORS( guard( routes ) )     force_include_usage, return_tokens_as_token_ids: fields, as if each request had them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from aserve.http.endpoint import Exchange, Handler
from aserve.http.replica import Replica
from aserve.stores.database import IN_MEMORY

EXPOSED: Final = ("x-request-id", "request-id", "retry-after", "x-aserve-warnings")
"""Headers of answers that scripts of other origins may read, besides those that browsers let them in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """The names are those of vLLM's flags, where it has them.

    allowed_origins: of web pages that may ask; none means that browsers let no page of another origin. allowed_methods,
    allowed_headers, allow_credentials: of what they may ask with.
    root_path: what a proxy in front takes off the paths.
    lenient: a field that nobody knows is left out, and told in `warnings`, and is no error.
    enable_force_include_usage, return_tokens_as_token_ids: for all requests.
    enable_tokenizer_info_endpoint: there is a GET /tokenizer_info.
    ui: there are pages for browsers: a chat at /, an inspector at /inspect, and the events that it draws.
    replica: where the prompts of requests are noted, for a router in front of several servers; None notes nothing.
    batch_store: the SQLite file of /v1/files and /v1/batches; ":memory:" is none. batch_store_bytes: see `BatchStore`.
    """

    allowed_origins: Sequence[str] = ()
    allowed_methods: Sequence[str] = ("*",)
    allowed_headers: Sequence[str] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    lenient: bool = False
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    enable_tokenizer_info_endpoint: bool = False
    ui: bool = True
    replica: Replica | None = None
    batch_store: str = IN_MEMORY
    batch_store_bytes: int | None = None

    def cors(self) -> list[Middleware]:
        """What answers browsers that ask first, which they do without a key."""
        if not self.allowed_origins:
            return []
        return [
            Middleware(
                CORSMiddleware,
                allow_origins=self.allowed_origins,
                allow_methods=self.allowed_methods,
                allow_headers=self.allowed_headers,
                allow_credentials=self.allow_credentials,
                expose_headers=EXPOSED,
            )
        ]

    def noted(self, handler: Handler) -> Handler:
        """The handler of a request that generates, whose prompt is noted where there is a router."""
        return handler if self.replica is None else self.replica.noted(handler)

    def applied(self, handler: Handler) -> Handler:
        """The handler of a request that generates, with what the options make of its fields."""

        noted = self.noted(handler)

        async def handle(exchange: Exchange) -> None:
            fields = exchange.fields
            if self.return_tokens_as_token_ids and fields.get("return_tokens_as_token_ids") is None:
                fields["return_tokens_as_token_ids"] = True
            options = fields.get("stream_options") or {}
            if self.enable_force_include_usage and fields.get("stream") is True and isinstance(options, dict):
                fields["stream_options"] = {**options, "include_usage": True, "continuous_usage_stats": True}
            await noted(exchange)

        return handle


DEFAULTS: Final = AppOptions()

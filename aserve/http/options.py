"""AppOptions: what an operator decides of the API, and how the decisions reach the requests.

CORS( guard( routes ) )     force_include_usage, return_tokens_as_token_ids: fields, as if each request had them
"""

from typing import Final

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from aserve.core.api_options import ApiOptions
from aserve.http.endpoint import Exchange, Handler
from aserve.http.idempotency import Idempotency
from aserve.http.replica import Replica
from aserve.stores.idempotency import IdempotencyStore

EXPOSED: Final = ("x-request-id", "request-id", "retry-after", "x-aserve-warnings", "idempotent-replayed")
"""Headers of answers that scripts of other origins may read, besides those that browsers let them in any case."""


class AppOptions(ApiOptions, frozen=True, kw_only=True):
    """What `create_app` takes of them, and what only Python can give.

    replica: where the prompts of requests are noted, for a router in front of several servers; None notes nothing.
    """

    replica: Replica | None = None

    def kept_answers(self, send_timeout_s: float) -> list[Middleware]:
        """What answers requests with an Idempotency-Key. send_timeout_s: a client's, who takes nothing."""
        if not self.idempotency_bytes:
            return []
        store = IdempotencyStore(max_bytes=self.idempotency_bytes, max_age_s=self.idempotency_age)
        return [Middleware(Idempotency, store=store, send_timeout_s=send_timeout_s)]

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

"""GET /openapi.json: the API as OpenAPI 3.1 describes it, made from the shapes that requests are checked against.

What the shapes do not say, a bound that depends on the model or on another field, is told by the 400 that comes.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve import __version__
from aserve.http.anthropic.errors import ANTHROPIC
from aserve.http.anthropic.schema import MessagesFields, PromptFields
from aserve.http.batch.routes import BatchFields
from aserve.http.dialect import dialect_at
from aserve.http.json_response import JsonResponse
from aserve.http.openai.adapters import LoadAdapterFields, UnloadAdapterFields
from aserve.http.openai.chat import ChatFields
from aserve.http.openai.completions import CompletionFields
from aserve.http.openai.fields import WITHOUT_EFFECT
from aserve.http.openai.responses.shapes import ResponseFields
from aserve.http.openai.tokenize import DetokenizeFields, TokenizeFields
from aserve.http.options import DEFAULTS, AppOptions
from aserve.http.pooling.classify import ClassifyFields
from aserve.http.pooling.embeddings import EmbeddingFields, PoolFields
from aserve.http.pooling.scores import RerankFields, ScoreFields

COMPONENTS: Final = "#/components/schemas/"

JSON_ROUTES: Final[Mapping[str, tuple[type[msgspec.Struct], str]]] = {
    "/v1/chat/completions": (ChatFields, "Answer a conversation; with stream, as server-sent events."),
    "/v1/completions": (CompletionFields, "Continue a text; with stream, as server-sent events."),
    "/v1/responses": (ResponseFields, "Answer items; with stream, as server-sent events; with background, later."),
    "/v1/responses/input_tokens": (ResponseFields, "The number of tokens that such an input has."),
    "/v1/embeddings": (EmbeddingFields, "The embedding of each input."),
    "/pooling": (PoolFields, "What the model makes of each input, whatever it is for."),
    "/classify": (ClassifyFields, "The probability of each label, for each input."),
    "/score": (ScoreFields, "How well documents answer queries."),
    "/v1/score": (ScoreFields, "The same."),
    "/rerank": (RerankFields, "Documents by how well they answer a query, the best first."),
    "/v1/rerank": (RerankFields, "The same."),
    "/v2/rerank": (RerankFields, "The same."),
    "/v1/messages": (MessagesFields, "Answer a conversation in Anthropic's words; with stream, as server-sent events."),
    "/v1/messages/count_tokens": (PromptFields, "The number of tokens that such a conversation has."),
    "/tokenize": (TokenizeFields, "The tokens of a text or a conversation."),
    "/detokenize": (DetokenizeFields, "The text of tokens."),
    "/v1/batches": (BatchFields, "Answer the lines of a file, behind everybody else's requests."),
    "/v1/load_lora_adapter": (LoadAdapterFields, "Load an adapter, which requests may then name as their model."),
    "/v1/unload_lora_adapter": (UnloadAdapterFields, "Forget an adapter."),
}
"""Routes that take a JSON object, its shape, and what they do."""

PLAIN_ROUTES: Final[Mapping[tuple[str, str], str]] = {
    ("/v1/responses/{response_id}", "get"): "A response that is stored; with ?stream=true, its events.",
    ("/v1/responses/{response_id}", "delete"): "Forget a response.",
    ("/v1/responses/{response_id}/cancel", "post"): "End a response that is made in the background.",
    ("/v1/responses/{response_id}/input_items", "get"): "The items that a response answers.",
    ("/v1/requests/{request_id}", "get"): "Where a request's time goes, or went; of one that asked for it, or is open.",
    ("/v1/requests/{request_id}", "delete"): 'End a request with what it has: its finish reason is "abort".',
    ("/v1/models", "get"): "The names under which the model is served.",
    ("/v1/models/{model}", "get"): "One of them.",
    ("/v1/files", "get"): "The files that were uploaded, and those that batches have made.",
    ("/v1/files", "post"): "Keep a file, sent as multipart/form-data.",
    ("/v1/files/{file_id}", "get"): "One of them.",
    ("/v1/files/{file_id}", "delete"): "Forget it.",
    ("/v1/files/{file_id}/content", "get"): "What is in it.",
    ("/v1/batches", "get"): "The batches, the newest first.",
    ("/v1/batches/{batch_id}", "get"): "One of them.",
    ("/v1/batches/{batch_id}/cancel", "post"): "Run no more of its lines.",
    ("/v1/usage", "get"): "What the tenant whose key it is has used, and has left.",
    ("/load", "get"): "How many requests are open.",
    ("/health", "get"): "200 unless only a restart can help.",
    ("/ping", "get"): "The same.",
    ("/ping", "post"): "The same.",
    ("/ready", "get"): "200 when a request would be taken.",
    ("/version", "get"): "aserve's version.",
    ("/metrics", "get"): "Prometheus metrics.",
    ("/reset_prefix_cache", "post"): "No later request finds what was computed so far.",
    ("/openapi.json", "get"): "This document.",
}
"""The others, by path and method."""

TEXT: Final = frozenset({"/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Routes that answer in plain text."""
STREAMING: Final = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/messages"),
        *("/v1/responses", "/v1/responses/{response_id}"),
    }
)
INSPECT: Final = "/v1/inspect/events"
EVENTS: Final = frozenset({INSPECT})
"""Routes that answer in events alone."""
ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "maxLength": 303},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
ANTHROPIC_ERROR: Final = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string", "maxLength": 303}},
        },
        "request_id": {"type": "string"},
    },
}


def openapi_route(options: AppOptions) -> Route:
    """The route of the document."""
    document = openapi(options)

    async def show(request: Request) -> Response:
        root: str = request.scope.get("root_path", "")  # below which it is mounted, or a proxy shows it
        return JsonResponse(document | {"servers": [{"url": root}]} if root else document)

    return Route("/openapi.json", show)


@cache
def _shapes() -> dict[str, Any]:
    """What requests are checked against, by name, made once: nobody changes it."""
    kinds = list(dict.fromkeys(kind for kind, _ in JSON_ROUTES.values()))
    _, schemas = msgspec.json.schema_components(kinds, ref_template=COMPONENTS + "{name}")
    for kind in kinds:
        shape = schemas[kind.__name__]
        if not issubclass(kind, PromptFields | BatchFields):
            shape["properties"] |= {name: {} for name in sorted(WITHOUT_EFFECT - shape["properties"].keys())}
        shape["additionalProperties"] = False
    return dict(schemas)


def openapi(options: AppOptions = DEFAULTS) -> dict[str, Any]:
    """The document. options: which routes there are."""
    paths: dict[str, dict[str, Any]] = {}
    for path, (kind, summary) in JSON_ROUTES.items():
        paths[path] = {"post": _operation(path, summary) | _takes(kind)}
    for (path, method), summary in PLAIN_ROUTES.items():
        paths.setdefault(path, {})[method] = _operation(path, summary)
    if options.enable_tokenizer_info_endpoint:
        paths["/tokenizer_info"] = {"get": _operation("/tokenizer_info", "What the tokenizer's configuration says.")}
    if options.ui:
        paths[INSPECT] = {"get": _operation(INSPECT, "What happens in the engine's steps, as server-sent events.")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "aserve", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {
            "schemas": _shapes() | {"Error": ERROR, "AnthropicError": ANTHROPIC_ERROR},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"key": []}, {"api_key": []}],
    }


def _takes(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": COMPONENTS + kind.__name__}}},
        }
    }


def _operation(path: str, summary: str) -> dict[str, Any]:
    media: Sequence[str] = ("text/plain",) if path in TEXT else ("application/json",)
    if path in EVENTS:
        media = ("text/event-stream",)
    if path in STREAMING:
        media = (*media, "text/event-stream")
    error = "Error" if dialect_at(path, (ANTHROPIC,)) is None else "AnthropicError"
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": {name: {} for name in media}},
            "default": {
                "description": "Why there is none.",
                "content": {"application/json": {"schema": {"$ref": COMPONENTS + error}}},
            },
        },
    }
    if names := re.findall(r"\{(\w+)\}", path):
        text = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    return operation

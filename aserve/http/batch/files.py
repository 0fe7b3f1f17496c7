"""/v1/files: what batches read and write."""

import secrets
import time
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve.core.errors import InvalidRequestError
from aserve.http.batch.multipart import parts_of
from aserve.http.errors import HttpError, echo
from aserve.http.json_response import JsonResponse
from aserve.http.keys import tenant_of
from aserve.http.paging import Page
from aserve.stores.batches import BatchStore, StoredFile

MAX_LISTED: Final = 10_000
"""At once, and where a request does not say how many."""


def new_file(tenant: str, name: str, purpose: str, num_bytes: int) -> StoredFile:
    """One that is about to be kept."""
    return StoredFile(f"file-{secrets.token_hex(16)}", tenant, int(time.time()), name, purpose, num_bytes)


async def file_of(store: BatchStore, tenant: str, id: str) -> StoredFile:
    """The tenant's file. Raises a 404."""
    file = await store.file(tenant, id)
    if file is None:
        raise HttpError(404, "file_not_found", f"there is no file {echo(id)}")
    return file


def file_routes(store: BatchStore) -> list[Route]:
    """All of them."""

    async def upload(request: Request) -> Response:
        parts = parts_of(request.headers.get("content-type", ""), await request.body())
        file, purpose = parts.get("file"), parts.get("purpose")
        if file is None or file.filename is None:
            raise InvalidRequestError("file: a file is needed", "file")
        if purpose is None or purpose.content != b"batch":
            raise InvalidRequestError("purpose must be batch: files are for batches here", "purpose")
        if any(name.startswith("expires_after") for name in parts):
            raise InvalidRequestError("expires_after: files are kept until they are deleted", "expires_after")
        await store.check_room(len(file.content), "file")
        kept = new_file(tenant_of(request.scope), file.filename, "batch", len(file.content))
        await store.add_file(kept, file.content)
        return JsonResponse(_card(kept))

    async def list_files(request: Request) -> Response:
        page = Page(request.query_params, limit=MAX_LISTED, max_limit=MAX_LISTED)
        purpose = request.query_params.get("purpose")
        files = await store.files(tenant_of(request.scope))
        cards = [_card(file) for file in reversed(files) if purpose in (None, file.purpose)]
        return JsonResponse(page.of(cards, "file"))

    async def get_file(request: Request) -> Response:
        return JsonResponse(_card(await _asked(request)))

    async def content(request: Request) -> Response:
        file = await _asked(request)
        return Response(await store.content(file.id), media_type="application/jsonl")

    async def delete(request: Request) -> Response:
        file = await _asked(request)
        await store.delete_file(file.id)
        return JsonResponse({"id": file.id, "object": "file", "deleted": True})

    async def _asked(request: Request) -> StoredFile:
        return await file_of(store, tenant_of(request.scope), request.path_params["file_id"])

    return [
        Route("/v1/files", upload, methods=["POST"]),
        Route("/v1/files", list_files),
        Route("/v1/files/{file_id}", get_file),
        Route("/v1/files/{file_id}", delete, methods=["DELETE"]),
        Route("/v1/files/{file_id}/content", content),
    ]


def _card(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_s,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }

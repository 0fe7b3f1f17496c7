"""JsonResponse: a body of JSON, encoded by msgspec."""

from typing import Any

import msgspec
from starlette.responses import Response


class JsonResponse(Response):
    """Answers 200 with any value that msgspec can encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return msgspec.json.encode(content)

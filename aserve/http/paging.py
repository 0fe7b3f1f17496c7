"""Pages of lists, as OpenAI has them: ?limit, ?order and ?after."""

from collections.abc import Sequence
from typing import Any, Final

from starlette.datastructures import QueryParams

from aserve.core.errors import InvalidRequestError
from aserve.http.errors import echo

MAX_PAGE: Final = 100
PAGE: Final = 20
"""Entries, where a request does not say how many."""
MAX_DIGITS: Final = 10


class Page:
    """Which part of a list is asked for. limit: where the request names none. Raises `InvalidRequestError`."""

    def __init__(self, query: QueryParams, *, limit: int = PAGE, max_limit: int = MAX_PAGE) -> None:
        self._limit = number(query, "limit", limit, at_least=1, at_most=max_limit)
        self._order = query.get("order", "desc")
        self._after = query.get("after")
        if self._order not in ("asc", "desc"):
            raise InvalidRequestError(f"order must be asc or desc, got {echo(self._order)}", "order")

    def of(self, entries: Sequence[dict[str, Any]], what: str) -> dict[str, Any]:
        """The list object. entries: the oldest first, each with an id of its own. what: one of them is called.

        Raises `InvalidRequestError` for an entry to begin after that is none of them.
        """
        ordered = entries if self._order == "asc" else entries[::-1]
        start = 0
        if self._after is not None:
            ids = [entry["id"] for entry in ordered]
            if self._after not in ids:
                raise InvalidRequestError(f"after: there is no {what} {echo(self._after)}", "after")
            start = ids.index(self._after) + 1
        data = ordered[start : start + self._limit]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": start + self._limit < len(ordered),
        }


def number(query: QueryParams, name: str, default: int, *, at_least: int, at_most: int = 2**31 - 1) -> int:
    """A parameter's value. Raises `InvalidRequestError`."""
    value = query.get(name)
    if value is None:
        return default
    is_number = value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS
    if not is_number or not at_least <= int(value) <= at_most:
        raise InvalidRequestError(f"{name} must be a number in [{at_least}, {at_most}], got {echo(value)}", name)
    return int(value)

"""Shapes: what all APIs share in taking a request's JSON: converting it to a struct, and errors that name the field."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from aserve.core.errors import ConstraintError, InvalidRequestError

ModelName = Annotated[str, Meta(max_length=256)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]

Fields = TypeVar("Fields", bound=msgspec.Struct)


def converted(raw: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """The fields of a request, by strict JSON types. Raises `InvalidRequestError` naming the one that is wrong."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _translated(error) from None


_MISSING: Final = re.compile(r"Object missing required field `(?P<field>\w+)`")


def _translated(error: msgspec.ValidationError) -> InvalidRequestError:
    """msgspec's "Expected `int`, got `str` - at `$.top_k`" as "top_k: expected int, got str", param "top_k"."""
    problem, found, path = str(error).rpartition(" - at `$")
    problem, path = (problem, path.strip("`.")) if found else (path, "")
    if missing := _MISSING.fullmatch(problem):
        path = f"{path}.{missing['field']}".lstrip(".")
        problem = "this field is required"
    param = re.split(r"[.\[]", path)[0] or None
    problem = problem[:1].lower() + problem[1:].replace("`", "")
    return InvalidRequestError(f"{path}: {problem}" if path else problem, param)


@contextmanager
def told_as_asked(asked: Mapping[str, object]) -> Iterator[None]:
    """What the engine calls `structured` is told by the name of the field that asked for it: the first that is there.

    asked: by their names, the fields that may have.
    """
    try:
        yield
    except InvalidRequestError as error:
        if error.param != "structured":
            raise
        field = next(name for name, value in asked.items() if value is not None)
        if isinstance(error, ConstraintError):
            error.param = field
            raise
        rest = error.message.removeprefix("structured")
        told = error.message if rest == error.message else f"{field}{rest.removeprefix('.calls')}"
        raise InvalidRequestError(told, field) from None

"""Shapes: what all APIs share in taking a request's JSON: converting it to a struct, and errors that name the field."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from aserve.core.errors import ConstraintError, InvalidRequestError
from aserve.http.errors import echo

MAX_MESSAGES: Final = 2048
"""Of a conversation."""

ModelName = Annotated[str, Meta(max_length=256)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]

Fields = TypeVar("Fields", bound=msgspec.Struct)


class UnknownFieldError(InvalidRequestError):
    """A name that nobody knows. fields: the object that has it, as it was sent."""

    def __init__(self, message: str, param: str, fields: dict[str, Any], name: str) -> None:
        super().__init__(message, param)
        self.fields = fields
        self.name = name


def converted(raw: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """The fields of a request, by strict JSON types. Raises `InvalidRequestError` naming the one that is wrong."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _translated(error) from None


_MISSING: Final = re.compile(r"Object missing required field `(?P<field>\w+)`")


def _translated(error: msgspec.ValidationError) -> InvalidRequestError:
    """msgspec's "Expected `int`, got `str` - at `$.top_k`" as "top_k: expected int, got str", param "top_k"."""
    problem, found, path = str(error).replace(" - at `key` in `$", " for its keys - at `$").rpartition(" - at `$")
    problem, path = (problem, path.strip("`.")) if found else (path, "")
    if missing := _MISSING.fullmatch(problem):
        path = f"{path}.{missing['field']}".lstrip(".")
        problem = "this field is required"
    param = re.split(r"[.\[]", path)[0] or None
    problem = problem[:1].lower() + problem[1:].replace("`", "")
    return InvalidRequestError(f"{path}: {problem}" if path else problem, param)


def check_names(raw: Any, value: Any, path: str = "") -> None:
    """Raise `InvalidRequestError` for a name in an object that its shape does not have, with the nearest that it has.

    Null asks for nothing, under any name: libraries send it for what their users left out.

    value: what `converted` made of `raw`; what stays as it was sent is not looked into.
    """
    if isinstance(value, msgspec.Struct):
        known = {*value.__struct_fields__, value.__struct_config__.tag_field}
        for name, member in raw.items():
            where = f"{path}.{echo(name)[1:-1]}".lstrip(".")
            if name not in known and member is not None:
                near = nearest(name, value.__struct_fields__)
                param = re.split(r"[.\[]", where)[0]
                raise UnknownFieldError(f"unknown field {where}{near}", param, raw, name)
            if name in value.__struct_fields__:
                check_names(member, getattr(value, name), where)
    elif isinstance(value, list):
        for index, (member, item) in enumerate(zip(raw, value, strict=True)):
            check_names(member, item, f"{path}[{index}]")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint to what may have been meant; "" where nothing is near."""
    matches = difflib.get_close_matches(name, list(known), n=1) if len(name) <= 64 else []
    return f"; did you mean {matches[0]}?" if matches else ""


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

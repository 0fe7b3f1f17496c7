"""Places in a JSON Schema: JSON Pointers (RFC 6901) after a "#", and the error that names one."""

from aserve.core.errors import InvalidRequestError


def escaped(name: str) -> str:
    """A name as a part of a JSON Pointer, short enough to be quoted."""
    name = name.replace("~", "~0").replace("/", "~1")
    return name if len(name) <= 64 else f"{name[:61]}..."


def refused(place: str, reason: str) -> InvalidRequestError:
    """The error that tells where in a JSON Schema something is wrong."""
    return InvalidRequestError(f"the JSON schema at {place}: {reason}", "structured")

"""Others' code that reads a model's folder: whatever it raises becomes the one line to show.

Libraries answer a malformed file with exceptions of any kind, pyo3's panics among them, which are no Exceptions. This
is for loading; what a request makes happen has edges of its own (aserve/edges.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aserve.core.errors import AserveError, CheckpointError
from aserve.core.faults import WISHES

MAX_CHARS: Final = 200


@contextmanager
def foreign(place: str, *, passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Raise `CheckpointError` for anything raised inside but our own errors and those in `passing`.

    place: what the line begins with, such as "tokenizer.json".
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, (AserveError, *WISHES, *passing)):
            raise
        raise CheckpointError(f"{place}: {type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What an exception says, in one line of printable characters."""
    line = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
    return "".join(char if char.isprintable() else " " for char in line)[:MAX_CHARS]

"""Others' exceptions become one line; our own, and wishes, stay what they are."""

import pytest

from aserve.core.errors import CheckpointError, ConfigError
from aserve.core.foreign import foreign


class Panic(BaseException):
    """As pyo3 raises it: no Exception."""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n  first\nsecond"), "a file: ValueError:   first"),
        (KeyError("x\x1b[2J"), "a file: KeyError: 'x\\x1b[2J'"),
        (RuntimeError("a\x1bb"), "a file: RuntimeError: a b"),
        (StopIteration(), "a file: StopIteration: no reason given"),
        (Panic("retry limit"), "a file: Panic: retry limit"),
        (RecursionError("deep" * 100), "a file: RecursionError: " + "deep" * 50),
    ],
)
def test_what_others_raise_is_one_line(error, line):
    with pytest.raises(CheckpointError) as caught, foreign("a file"):
        raise error
    assert caught.value.message == line
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [ConfigError("ours"), KeyboardInterrupt(), SystemExit(1), Panic("let by")])
def test_what_is_ours_or_wished_for_passes(error):
    with pytest.raises(type(error)) as caught, foreign("a file", passing=(Panic,)):
        raise error
    assert caught.value is error

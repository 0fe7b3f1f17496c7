"""How much work a call is, counted and not timed: the same on any machine, however busy."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs, those of what it calls included."""
    num_lines = 0

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines

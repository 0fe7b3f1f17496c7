"""Budget: what one rendering of a template may cost, in steps, in bytes that it makes or reads, and in processor time.

Everything is charged before it is done, so that nothing large is ever made; what a step takes differs, so a clock is
looked at too, every so many steps. Knows values, and nothing of templates.
"""

import time
from collections.abc import Collection, ItemsView, KeysView, ValuesView
from typing import Any, Final, TypeGuard

from jinja2.exceptions import TemplateError

MAX_STEPS: Final = 20_000_000
"""A step is a node of the template in a turn of a loop: about 30 ns."""
MAX_CPU_S: Final = 0.75
STEPS_PER_LOOK: Final = 1000
BYTES_PER_STEP: Final = 100
"""Bytes that are read or made in the time of a step, or fewer."""
ITEM_BYTES: Final = 8
"""What a member of a list takes there."""
STEPS_PER_MEMBER: Final = 4
MAX_INT_BITS: Final = 4096

SCALARS: Final = frozenset({int, float, bool, type(None)})
CONTAINERS: Final = (str, list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)


class TemplateLimitError(TemplateError):
    """A rendering ran out of its budget."""


class TemplateLengthError(TemplateError):
    """A rendering is longer than it may be."""

    def __init__(self, max_chars: int) -> None:
        super().__init__(f"it renders to over {max_chars} characters")
        self.max_chars = max_chars


class Budget:
    """What is left of it. max_bytes: made and read, all together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.refill()

    def refill(self) -> None:
        """Begin anew."""
        self._steps_left = MAX_STEPS
        self._bytes_left = self._max_bytes
        self._look_at = MAX_STEPS - STEPS_PER_LOOK
        self._end_s = time.thread_time() + MAX_CPU_S

    def spend(self, num_steps: int, num_bytes: int = 0) -> None:
        """Raise `TemplateLimitError` where there is not so much."""
        self._bytes_left -= num_bytes
        self._steps_left -= num_steps + num_bytes // BYTES_PER_STEP
        if self._steps_left < self._look_at or self._bytes_left < 0:
            self._look()

    def _look(self) -> None:
        self._look_at = self._steps_left - STEPS_PER_LOOK
        if self._bytes_left < 0:
            raise TemplateLimitError(f"it makes over {self._max_bytes} bytes on the way")
        if self._steps_left < 0:
            raise TemplateLimitError(f"it takes over {MAX_STEPS} steps")
        if time.thread_time() > self._end_s:
            raise TemplateLimitError(f"it takes over {MAX_CPU_S} s")

    def weigh(self, value: Any) -> Any:
        """Charge for all that a value holds, however often it holds the same thing. Gives the value."""
        if isinstance(value, str):
            self.spend(1, num_bytes_of(value))
        elif is_container(value):
            self._weigh_members(value)
        else:
            self.spend(1)
        return value

    def _weigh_members(self, value: Collection[Any]) -> None:
        stack: list[Any] = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                self.spend(1, num_bytes_of(item))
            elif is_container(item):
                self.spend(STEPS_PER_MEMBER * len(item) + 1, num_bytes_of(item))
                members = (item, item.values()) if isinstance(item, dict) else (item,)
                stack.extend(member for of in members for member in of if type(member) not in SCALARS)

    def copy(self, value: Any) -> Any:
        """Charge for a container itself, as whoever makes or copies it does. Gives the value."""
        if is_container(value):
            self.spend(1, num_bytes_of(value))
        return value

    def check_int(self, num_bits: int) -> None:
        """Raise `TemplateLimitError` for an integer of so many bits."""
        if num_bits > MAX_INT_BITS:
            raise TemplateLimitError(f"it makes an integer of over {MAX_INT_BITS} bits")


def is_container(value: Any) -> TypeGuard[Collection[Any]]:
    """Whether it has members, or characters, that are there already."""
    return isinstance(value, CONTAINERS)


def num_bytes_of(value: Collection[Any]) -> int:
    """Roughly what a container takes without its members. A string that is not ASCII may take 4 bytes a character, and
    one that is marked as safe is made twice.
    """
    if isinstance(value, str):
        return len(value) * (1 if value.isascii() else 4) * (1 if type(value) is str else 2)
    return ITEM_BYTES * len(value)

"""What scripts/loc.py takes for code, and for words about it."""

import pytest
from loc import Lines, lines_of, room_of

SOURCE = '''"""A module.

Of two paragraphs.
"""

# A comment.
NAME = "no docstring"  # a line of code
"""What it is."""


def act() -> str:
    """One line."""
    return """text
    that is # no comment
    """
'''


def test_lines_are_code_or_words_or_blank_and_nothing_twice() -> None:
    """Catches a comment in a string, a string that is used, and a line with both, each counted as words."""
    assert lines_of("a.py", SOURCE) == Lines(code=5, told=6, blank=4, files=1, longest=15)
    assert lines_of("a.cpp", "// one\n\nint two;\n") == Lines(code=2, told=0, blank=1, files=1, longest=3)


@pytest.mark.parametrize(
    ("path", "room"),
    [
        ("aserve/engine.py", "aserve"),
        ("aserve/http/openai/chat.py", "aserve/http"),
        ("tests/http/test_chat.py", "tests"),
        ("docs/design.md", None),
        ("aserve/demo/tokenizer.json", None),
    ],
)
def test_a_room_is_a_folder(path: str, room: str | None) -> None:
    assert room_of(path) == room

"""Pieces of llguidance's Lark: texts with special tokens in them, free text up to a marker, thoughts before an answer.

A text is a literal, but for special tokens in it: those are tokens of their own, which no text can spell.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from aserve.core.structured import ThoughtRules
from aserve.text.formats.families import CHANNELS
from aserve.text.formats.named import thoughts_named
from aserve.text.formats.syntax import Channels

Special = Mapping[str, int]
"""Ids of special tokens, by their texts."""

ANY_TEXT: Final = r"/(.|\n)*/"
TERMINALS: Final = (f"TEXT: {ANY_TEXT}", r"NEWLINES: /\n{0,2}/")
ANSWER: Final = "answer"


def terms(text: str, special: Special) -> str:
    """A text as terms of a rule: literals, and special tokens by their ids."""
    found: list[str] = []
    while text:
        places = [(text.find(name), -len(name), name) for name in special if name in text]
        place, _, name = min(places, default=(len(text), 0, ""))
        if place:
            found.append(json.dumps(text[:place]))
        if name:
            found.append(f"<[{special[name]}]>")
        text = text[place + len(name) :]
    return " ".join(found)


def until(name: str, marker: str, special: Special, text: str = "TEXT") -> list[str]:
    """A rule: any text, up to and with a marker."""
    if marker in special:
        return [f"{name}: {text} <[{special[marker]}]>"]
    return [f"{name}[lazy]: {text} {json.dumps(marker)}"]


def literally(text: str) -> str:
    """A regular expression of a text."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)


def message(channels: Channels, special: Special) -> str:
    """A rule: a message that is not the last, whose channel is any but the final one, and the next one's start."""
    between = " | ".join(f'"{name}"' for name in channels.names if name != "final")
    channel, text = terms(channels.channel, special), terms(channels.message, special)
    ends, start = terms(channels.ends[0], special), terms(channels.start, special) + ' "assistant"'
    return f"message: {channel} ({between}) {text} TEXT {ends} {start}"


def final(channels: Channels, special: Special) -> str:
    """The head of a message for the user."""
    return f'{terms(channels.channel, special)} "final" {terms(channels.message, special)}'


def after_thoughts(grammar: str, rules: ThoughtRules, special: Special) -> str:
    """A grammar of an answer, and thoughts before it, free until their end; none, unless the prompt has begun one."""
    channels = CHANNELS.get(rules.format)
    if channels is not None:
        lines = [f"start: message* {final(channels, special)} @{ANSWER}", message(channels, special)]
    else:
        thoughts = thoughts_named(rules.format)
        assert thoughts is not None, "thoughts are in a format that is known"
        thought = "thought NEWLINES"
        if not rules.in_thought:
            thought = f"({terms(thoughts.begin, special)} {thought})?"
        lines = [f"start: {thought} @{ANSWER}", *until("thought", thoughts.end, special)]
    return referring("\n".join(["%llguidance {}", *lines, *TERMINALS, ""]), ANSWER, grammar)


def referring(lark: str, name: str, grammar: str) -> str:
    """Lark that refers to another grammar, as @name."""
    first, *others = _grammars(grammar)
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": name}, *others]})


def _grammars(grammar: str) -> list[dict[str, Any]]:
    """As llguidance takes several: it gives them as JSON, or one of them as Lark."""
    if grammar.startswith("{"):
        made: list[dict[str, Any]] = json.loads(grammar)["grammars"]
        return made
    return [{"lark_grammar": grammar}]

"""How a word of the command line, the environment or a file is read; a `ConfigError` says what is expected."""

from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from aserve.core.errors import ConfigError

TRUE_WORDS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
SUFFIXES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
LOOPBACK: Final = "http://127.0.0.1:8000"
MAX_STORED: Final = 2**50
"""Bytes: more than a machine has, and far from what SQLite counts to."""


def read_text(word: str) -> str:
    """A text that is not empty: a variable that was not set, or `"$UNSET"`, would else name a file, a key or a host."""
    if not word:
        raise ConfigError("a text is expected, got an empty one; leave it out for the default")
    return word


def read_bool(word: str) -> bool:
    """true or false, in the usual spellings."""
    if word.lower() not in TRUE_WORDS:
        raise ConfigError(f"true or false is expected, got {word!r}")
    return TRUE_WORDS[word.lower()]


def read_count(word: str) -> int:
    """A whole number; k, M, G are powers of 1000 and Ki, Mi, Gi (perhaps with a B) powers of 1024."""
    digits = word.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    suffix = word[len(digits) :].lower().removesuffix("b")
    try:
        value = float(digits) * SUFFIXES[suffix] if suffix else int(digits)
    except (ValueError, KeyError):
        raise ConfigError(f"a whole number is expected, perhaps with k, M, G, Ki, Mi or Gi, got {word!r}") from None
    if isinstance(value, float) and not value.is_integer():  # nor is an infinite one, such as 1e400k
        raise ConfigError(f"a whole number is expected, got {word!r}")
    return int(value)


def read_number(word: str) -> float:
    """A decimal number."""
    try:
        return float(word)
    except ValueError:
        raise ConfigError(f"a number is expected, got {word!r}") from None


def read_object(word: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        return msgspec.json.decode(word, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"a JSON object is expected, got {word!r}: {error}") from None


def read_texts(word: str) -> list[str]:
    """A JSON list of strings."""
    try:
        return msgspec.json.decode(word, type=list[str])
    except msgspec.DecodeError as error:
        raise ConfigError(f"a JSON list of strings is expected, got {word!r}: {error}") from None


def read_seconds(least: float = 0.0, most: float = 86400.0) -> Callable[[str], float]:
    """Reads a number of seconds, by default a day at most."""

    def read(word: str) -> float:
        if not least <= (seconds := read_number(word)) <= most:
            raise ConfigError(f"seconds in [{least:g}, {most:.15g}] are expected, got {word!r}")
        return seconds

    return read


def read_within(least: int, most: int, what: str = "a number") -> Callable[[str], int]:
    """Reads a count within bounds. what: is expected, as a refusal has it."""

    def read(word: str) -> int:
        if not least <= (value := read_count(word)) <= most:
            raise ConfigError(f"{what} in [{least}, {most}] is expected, got {word!r}")
        return value

    return read


def read_url(word: str) -> str:
    """Where a server is: http or https, a host and perhaps a port and a path. One that none could be at is refused."""
    try:
        parts = urlsplit(word)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")  # as it is looked up
    except ValueError:  # a port, an address in brackets or a name that there cannot be
        is_whole = False
    if not is_whole or "?" in word or "#" in word or " " in word or not word.isprintable():
        raise ConfigError(f"a URL such as {LOOPBACK} is expected, got {word!r}")
    return word


def read_choice(allowed: Sequence[str]) -> Callable[[str], str]:
    """Reads one of these words."""

    def read(word: str) -> str:
        if word not in allowed:
            raise ConfigError(f"one of {', '.join(allowed)} is expected, got {word!r}")
        return word

    return read


def read_root(word: str) -> str:
    """A path that begins with a slash and ends without one; "" is the root."""
    if word and (not word.startswith("/") or word.endswith("/")):
        raise ConfigError(f"a path such as /api is expected, got {word!r}")
    return word

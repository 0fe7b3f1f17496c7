"""Conversation: what was said so far, and how answers are to be sampled. Kept in files as OpenAI's messages."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aserve.cli.asking.choosing import checked
from aserve.core.errors import ConfigError, InvalidRequestError

ROLES: Final = ("system", "user", "assistant")
MAX_FILE_BYTES: Final = 2**26

Message = dict[str, str]


class Conversation:
    """Messages in turn, user and assistant, after the system prompt. fields: of sampling."""

    def __init__(self, system: str | None = None, fields: Mapping[str, Any] | None = None) -> None:
        self.system = system
        self.fields: dict[str, Any] = dict(fields or {})
        self.messages: list[Message] = []

    def with_question(self, text: str) -> list[Message]:
        """What is sent to have a question answered."""
        return [*self._system_messages(), *self.messages, {"role": "user", "content": text}]

    def answered(self, question: str, answer: str) -> None:
        """Remember a question and its answer."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def take_back(self) -> str | None:
        """Forget the last question and its answer; the question, None where there was none."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def clear(self) -> None:
        """Forget all that was said; system prompt and sampling stay."""
        self.messages = []

    def set_field(self, name: str, word: str) -> None:
        """Set a field of sampling from what was typed; "default" takes it back. Raises `InvalidRequestError`."""
        if word == "default":
            self.fields.pop(name, None)
            return
        self.fields |= checked({name: _value(name, word)})

    def save(self, path: Path, model: str) -> None:
        """Write it to a file, readable by its user alone, as a whole or not at all. Raises `ConfigError`."""
        content = {"model": model, "messages": [*self._system_messages(), *self.messages], "sampling": self.fields}
        beside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1, ensure_ascii=False)
            beside.replace(path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Go on with what a file has: what `save` wrote, or a list of messages. Raises `ConfigError`, changing nothing.

        Sampling stays as it is where the file has none.
        """
        content = _read(path)
        messages, fields = content, self.fields
        if isinstance(content, dict):
            messages = content.get("messages")
            try:
                fields = checked(content["sampling"]) if content.get("sampling") else fields
            except (InvalidRequestError, TypeError) as error:
                raise ConfigError(f"{path}: sampling: {error}") from None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ConfigError(f"{path} holds no messages, each with a role ({', '.join(ROLES)}) and a text as content")
        said = [{"role": message["role"], "content": message["content"]} for message in messages]
        self.system = said.pop(0)["content"] if said and said[0]["role"] == "system" else None
        self.messages, self.fields = said, dict(fields)

    def _system_messages(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def _value(name: str, word: str) -> Any:
    """What a word means: JSON where it is some, else itself; the text that ends an answer is always itself."""
    if name == "stop":
        return word
    try:
        return json.loads(word)
    except ValueError:
        return word


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has over {MAX_FILE_BYTES} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)

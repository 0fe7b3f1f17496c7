"""Source: whoever answers. What is asked of it, what it answers piece by piece, and what it says of that at the end."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from aserve.core.errors import AserveError


class AskError(AserveError):
    """There is no answer, or not the whole of it; the message is the line to show."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A question. messages: of a chat; None where `prompt` is a text to go on with.

    fields: of sampling, by OpenAI's names and vLLM's. schema: a JSON Schema that the answer has to follow.
    """

    messages: Sequence[Mapping[str, str]] | None = None
    prompt: str = ""
    fields: Mapping[str, Any] = {}
    schema: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise `AskError` for a text that came as bytes which are none, by a pipe or the command line."""
        for text in (self.prompt, *(message["content"] for message in self.messages or ())):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise AskError(f"the text is not UTF-8: character {error.start} is a byte that is no text") from None


class Piece(msgspec.Struct, frozen=True):
    """More of an answer. is_thought: it is not for the user, but what the model thinks."""

    text: str
    is_thought: bool = False


class Ended(msgspec.Struct, frozen=True):
    """The end of an answer: tokens of prompt and answer, where they are known, and why it ended."""

    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    finish_reason: str | None = None


class Source(Protocol):
    """Answers questions. name: of the model."""

    name: str

    def ask(self, asked: Asked) -> AsyncGenerator[Piece | Ended]:
        """The answer as it grows, and its end. Raises `AserveError` where there is none."""
        ...

    async def aclose(self) -> None:
        """Give back what it holds."""
        ...

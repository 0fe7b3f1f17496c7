"""Encoding: an engine's ways between texts and tokens, which are made of its `texts`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from aserve.texts import Texts


class Encoding(ABC):
    """What encodes and decodes, given `texts`. Raises `UnavailableError` before the model is loaded."""

    @property
    @abstractmethod
    def texts(self) -> Texts:
        """What is done with texts, and its bounds."""

    async def encode(self, text: str, *, add_special_tokens: bool = True, must_fit: bool = False) -> tuple[int, ...]:
        """Token ids of a text. Long texts are tokenized off the event loop.

        must_fit: refuse one that is too long for a prompt, before it is tokenized where that can be told. Raises
        `InvalidRequestError` (no text, a bad one, over `texts.MAX_TEXT_CHARS`) or `ContextLengthError` (it cannot fit).
        """
        return await self.texts.encode(text, add_special_tokens=add_special_tokens, must_fit=must_fit)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
        add_special_tokens: bool = False,
        must_fit: bool = False,
    ) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template; see `ChatTemplate.render` for the choices.

        add_special_tokens: on top of those that the template writes, which is rarely wanted. must_fit: as in `encode`.
        Raises `InvalidRequestError`, naming the field at fault.
        """
        return await self.texts.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            add_special_tokens=add_special_tokens,
            must_fit=must_fit,
        )

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises `InvalidRequestError` for what is none, or outside the vocabulary."""
        return await self.texts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_strings(self, token_ids: Sequence[int]) -> tuple[str, ...]:
        """Each token as the vocabulary spells it. Raises `UnavailableError` before the model is loaded."""
        return self.texts.tokenizer.token_strings(token_ids)

    def token_bytes(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> tuple[bytes, ...]:
        """What each token stands for, special ones for their name or, if skipped, for nothing."""
        tokenizer = self.texts.tokenizer
        table = tokenizer.text_bytes if skip_special_tokens else tokenizer.token_bytes
        return tuple(map(table.__getitem__, token_ids))

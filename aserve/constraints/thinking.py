"""A budget of thinking tokens: a constraint that ends an answer's thoughts, in front of whatever else it must be.

    <think> a b c d e          budget 5: the next token has to be </think>, if the structure behind allows it
    <think> a b </think> ...   free, and so is what follows, but for the structure

What a budget counts are the tokens between the markers of thoughts, of all thoughts of an answer together. The end is
forced where a character is whole, so that an answer may think three tokens more. Knows token ids and their bytes; what
a structure is, is matcher.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from aserve.core.ports import Constraint, Structure
from aserve.text.formats.syntax import Thoughts
from aserve.text.tokenizer import Tokenizer


class Thought(NamedTuple):
    """How far an answer has come. tail: its last bytes, fewer than a marker has. num_said: tokens of the forced end."""

    is_open: bool
    num_tokens: int = 0
    tail: bytes = b""
    num_said: int = 0


class Budget:
    """What ends thoughts, for one model. end_ids: the tokens of their end."""

    def __init__(self, tokenizer: Tokenizer, thoughts: Thoughts, vocab_size: int) -> None:
        self.end_ids: Final = tokenizer.encode(thoughts.end, add_special_tokens=False)
        self.vocab_size: Final = vocab_size
        self._bytes = tokenizer.token_bytes
        self._begin, self._end = thoughts.begin.encode(), thoughts.end.encode()
        self._kept = max(len(self._begin), len(self._end), 4) - 1

    def after(self, state: Thought, token_ids: Sequence[int]) -> Thought:
        """What tokens more come to."""
        for token_id in token_ids:
            state = self._next(state, token_id)
        return state

    def _next(self, state: Thought, token_id: int) -> Thought:
        is_open, num_tokens, text, num_said = state
        text += self._bytes[token_id]
        marker = self._end if is_open else self._begin
        while (at := text.find(marker)) >= 0:
            is_open, text = not is_open, text[at + len(marker) :]
            marker = self._end if is_open else self._begin
        follows = is_open and num_said < len(self.end_ids) and token_id == self.end_ids[num_said]
        counts = state.is_open and is_open
        return Thought(is_open, num_tokens + counts, text[-self._kept :], num_said + 1 if follows else 0)

    def forced(self, state: Thought, most: int) -> tuple[int, ...]:
        """The tokens that have to come now; () where thoughts may go on, or there are none."""
        if not state.is_open or state.num_tokens < most or (not state.num_said and _is_cut(state.tail)):
            return ()
        return self.end_ids[state.num_said :]


@dataclass(frozen=True, slots=True)
class BoundedThinking:
    """A `Structure`: that of an answer (None: any text), whose thoughts have a budget.

    begins: whether the answer, or what of it there is, ends in a thought.
    """

    budget: Budget
    most: int
    begins: Thought
    structure: Structure | None = None

    def constraint(self) -> Constraint:
        """As the Protocol says."""
        return ThinkingConstraint(self)

    def after(self, token_ids: Sequence[int]) -> Structure:
        """As the Protocol says."""
        structure = None if self.structure is None else self.structure.after(token_ids)
        return replace(self, begins=self.budget.after(self.begins, token_ids), structure=structure)

    def going_on(self, *, ignores_end: bool) -> Structure:
        """As the Protocol says."""
        structure = None if self.structure is None else self.structure.going_on(ignores_end=ignores_end)
        return replace(self, structure=structure)


class ThinkingConstraint:
    """A `Constraint`. Where a budget and a structure leave nothing together, as in a call that spells a marker of
    thoughts, the structure counts.
    """

    def __init__(self, bounded: BoundedThinking) -> None:
        self._budget, self._most = bounded.budget, bounded.most
        self._state = bounded.begins
        self._inner = _Free(bounded.budget.vocab_size) if bounded.structure is None else bounded.structure.constraint()

    @property
    def num_tokens(self) -> int:
        """As the Protocol says."""
        return self._inner.num_tokens

    @property
    def failure(self) -> str | None:
        """As the Protocol says."""
        return self._inner.failure

    def advance(self, token_ids: Sequence[int]) -> None:
        """As the Protocol says."""
        self._state = self._budget.after(self._state, token_ids)
        self._inner.advance(token_ids)

    def masks(self, draft_ids: Sequence[int] = ()) -> bytes:
        """As the Protocol says."""
        inner, state = self._inner.masks(draft_ids), self._state
        num_bytes = len(inner) // (len(draft_ids) + 1)
        masks: list[bytes] = []
        for place in range(len(draft_ids) + 1):
            mask = inner[place * num_bytes : (place + 1) * num_bytes]
            mask = _only(self._budget.forced(state, self._most)[:1], mask)
            masks.append(mask)
            if place == len(draft_ids) or not _allows(mask, draft_ids[place]):
                masks.append(bytes((len(draft_ids) - place) * num_bytes))
                break
            state = self._budget.after(state, draft_ids[place : place + 1])
        return b"".join(masks)

    def forced(self) -> tuple[int, ...]:
        """As the Protocol says."""
        end_ids = self._budget.forced(self._state, self._most)
        if end_ids and self._inner.num_valid(end_ids) == len(end_ids):
            return end_ids
        token_ids = self._inner.forced()
        return token_ids[: self.num_valid(token_ids)]

    def num_valid(self, token_ids: Sequence[int]) -> int:
        """As the Protocol says; fewer, where a structure does not let a budget have its way."""
        state, most = self._state, self._inner.num_valid(token_ids)
        for place, token_id in enumerate(token_ids[:most]):
            if token_id not in (self._budget.forced(state, self._most)[:1] or (token_id,)):
                return place
            state = self._budget.after(state, (token_id,))
        return most


class _Free:
    """A `Constraint` that is none."""

    def __init__(self, vocab_size: int) -> None:
        num_words = -(-vocab_size // 32)
        self._mask = ((1 << vocab_size) - 1).to_bytes(num_words * 4, "little")
        self.num_tokens = 0
        self.failure: str | None = None

    def advance(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)

    def masks(self, draft_ids: Sequence[int] = ()) -> bytes:
        return self._mask * (len(draft_ids) + 1)

    def forced(self) -> tuple[int, ...]:
        return ()

    def num_valid(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)


def _only(token_ids: Sequence[int], mask: bytes) -> bytes:
    """A mask of these tokens, if it allows one of them; else as it is."""
    for token_id in token_ids:
        if _allows(mask, token_id):
            made = bytearray(len(mask))
            made[token_id // 8] = 1 << token_id % 8
            return bytes(made)
    return mask


def _is_cut(text: bytes) -> bool:
    """Whether it ends within a character of UTF-8."""
    for num_bytes in range(1, min(4, len(text) + 1)):
        byte = text[-num_bytes]
        if byte & 0xC0 != 0x80:
            return byte >= 0xC0 and num_bytes < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False


def _allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)

"""Inputs of models that pool: texts, or pairs of them, to token ids, cut where that is asked for.

[CLS] query [SEP] document [SEP]     what is cut off is text: special tokens stay, and of a pair the query
0     0     0     1        1         where the second text begins, the tokenizer's type ids say
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from aserve.core.errors import ContextLengthError
from aserve.core.pooling import TokenizedInput
from aserve.text.tokenizer import Tokenizer

TextInput = str | tuple[str, str]


class Cut(msgspec.Struct, frozen=True):
    """Down to how many tokens an input is cut, and which of them stay: the first ("right") or the last ("left")."""

    limit: int
    side: Literal["left", "right"] = "right"


def tokenized(
    tokenizer: Tokenizer, inputs: Sequence[TextInput], params: Sequence[str], *, special: bool, cut: Cut | None
) -> list[TokenizedInput]:
    """Token ids of each. params: what each is called in errors. special: whether special tokens are put around them.

    Raises `InvalidRequestError` as `Tokenizer.encode`, and `ContextLengthError` for a pair whose second text is too
    short to be cut by as much as is too much.
    """
    found = []
    encodings = tokenizer.encode_all(inputs, params, add_special_tokens=special)
    for text, param, (token_ids, sequences, types) in zip(inputs, params, encodings, strict=True):
        kept: Sequence[int] = range(len(token_ids))
        if cut is not None and len(token_ids) > cut.limit:
            kept = _kept(sequences, 0 if isinstance(text, str) else 1, cut, param)
        second_at = next((place for place, index in enumerate(kept) if types[index]), None)
        found.append(TokenizedInput(tuple(token_ids[index] for index in kept), second_at))
    return found


def cut_ids(token_ids: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
    """Of an input that came as token ids."""
    if cut is None or len(token_ids) <= cut.limit:
        return token_ids
    return token_ids[: cut.limit] if cut.side == "right" else token_ids[-cut.limit :]


def _kept(sequences: Sequence[int | None], which: int, cut: Cut, param: str) -> Sequence[int]:
    """Indices of the tokens that stay, where those of text `which` may go."""
    places = [index for index, sequence in enumerate(sequences) if sequence == which]
    num_over = len(sequences) - cut.limit
    if num_over > len(places) - which:  # of a pair something has to be left of the second
        raise ContextLengthError(
            f"{param}: {len(sequences)} tokens cannot be cut to {cut.limit}: only {len(places)} of them may go", param
        )
    dropped = set(places[-num_over:] if cut.side == "right" else places[:num_over])
    return [index for index in range(len(sequences)) if index not in dropped]

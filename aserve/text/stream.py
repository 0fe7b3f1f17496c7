"""TextStream: one choice's tokens to what its reader sees. Token deltas in, text deltas out, any chunking alike.

    token ids --> Detokenizer --> text of the first min_tokens ----------------> reader
                                \\-> text after them --> StopMatcher --> reader

Holds back an unfinished character and the beginning of a possible stop string, nothing else, and gives both up when
the sequence ends. Knows nothing of the scheduler, which has to be told when a stop string ends a sequence.

  I20 the deltas' texts make up the whole text and their tokens are those that usage counts; no delta ends inside a
character, and none has any part of a stop string.
"""

from typing import Final

from aserve.core.outputs import FinishReason, SeqDelta, TextDelta
from aserve.core.params import SamplingParams
from aserve.text.detokenizer import Detokenizer
from aserve.text.stop_strings import StopMatcher
from aserve.text.tokenizer import Tokenizer


class TextStream:
    """One sequence's text. Special tokens are not shown (unless skip_special_tokens is off), nor is the token at which
    the model ended by itself; the token that stop_token_ids named is, unless it is special. A stop string is not shown.
    include_stop_str_in_output shows the last two.

    keep_leading_space: the text continues a prompt, so a space before its first word is shown
    (SentencePiece drops it from a text of its own). markers: texts for whoever reads the text; special tokens that are
    a part of them are shown.
    is_plain: a token that has a text of its own (`Tokenizer.token_texts`), and ends nothing, adds just that. Such a
    token need not be pushed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        keep_leading_space: bool = False,
        markers: frozenset[str] = frozenset(),
    ) -> None:
        skips = params.skip_special_tokens
        shown_bytes = tokenizer.bytes_showing(markers) if skips else tokenizer.token_bytes
        self._detokenizer = Detokenizer(shown_bytes, keep_leading_space=keep_leading_space)
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._shows_stop = params.include_stop_str_in_output
        self._num_unmatched = params.min_tokens  # tokens to come whose text is not searched
        self._finished = False
        self._has_plain = shown_bytes is tokenizer.text_bytes and not params.stop
        self.is_plain = False  # before the first push has told whether a leading space is dropped

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text; the sequence itself may be running on."""
        return self._matcher is not None and self._matcher.stop is not None

    def push(self, delta: SeqDelta) -> TextDelta | None:
        """What the reader learns from these tokens; None when that is nothing, as always after the end.

        Where a stop string completes, the delta is terminal, and has the tokens, and their scores, up to the one that
        completed it.
        """
        if self._finished or not (delta.token_ids or delta.finish_reason or delta.prompt_scores):
            return None
        ended_by_model = delta.finish_reason is FinishReason.STOP and delta.stop_reason is None
        is_hidden = ended_by_model and not self._shows_stop
        text, num_tokens = self._read(delta.token_ids[:-1] if is_hidden else delta.token_ids)
        if not self.stopped:
            num_tokens = len(delta.token_ids)
            if delta.finish_reason is not None:
                text += self._flush()
        finish_reason = delta.finish_reason
        stop_reason: int | str | None = delta.stop_reason
        if self._matcher is not None and self._matcher.stop is not None:
            finish_reason, stop_reason = FinishReason.STOP, self._matcher.stop
            text += stop_reason if self._shows_stop else ""
        self._finished = finish_reason is not None
        self.is_plain = self._has_plain and self._detokenizer.is_between_characters
        return TextDelta(
            text,
            delta.token_ids[:num_tokens],
            finish_reason,
            stop_reason,
            delta.index,
            delta.num_cached_tokens,
            delta.scores[:num_tokens],
            delta.prompt_scores,
            delta.cumulative_logprob,
        )

    def _read(self, token_ids: tuple[int, ...]) -> tuple[str, int]:
        """The text to show, and how many tokens were read: not all where a stop string completes before the last."""
        if self._matcher is None:
            return self._detokenizer.feed(token_ids), len(token_ids)
        num_unmatched = min(self._num_unmatched, len(token_ids))
        self._num_unmatched -= num_unmatched
        text = self._detokenizer.feed(token_ids[:num_unmatched])
        for position in range(num_unmatched, len(token_ids)):
            text += self._matcher.feed(self._detokenizer.feed(token_ids[position : position + 1]))
            if self._matcher.stop is not None:
                return text, position + 1
        return text, len(token_ids)

    def _flush(self) -> str:
        tail = self._detokenizer.flush()
        if self._matcher is None or self._num_unmatched > 0:
            return tail
        text = self._matcher.feed(tail)
        return text if self._matcher.stop is not None else text + self._matcher.flush()


class VectorStream:
    """What stands for a `TextStream` where a model pools: its one delta has a vector, and no text."""

    is_plain: Final = False

    def push(self, delta: SeqDelta) -> TextDelta:
        """The vector, and the end."""
        return TextDelta(
            "",
            (),
            delta.finish_reason,
            delta.stop_reason,
            num_cached_tokens=delta.num_cached_tokens,
            vector=delta.vector,
        )

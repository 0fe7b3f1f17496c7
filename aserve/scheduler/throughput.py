"""Throughput: how fast a full engine gets on, measured on the steps that it made. Is told times, and reads no clock."""

from typing import Final

HALF_LIFE_S: Final = 10.0
"""Of what was measured: after so many seconds of full steps it counts half."""
HALF_LIFE_ANSWERS: Final = 32
"""Of an answer's length: after so many others it counts half."""

_ANSWER_DECAY: Final = 0.5 ** (1 / HALF_LIFE_ANSWERS)


class Throughput:
    """Tokens a second of the steps that were made while others waited, and tokens of an answer.

    Only such steps tell what the engine can do: one request alone takes a step for each token, and so would any number
    more. From one plan to the next is as long as a step takes.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._answers = 0.0
        self._answered_tokens = 0.0
        self._last_s = 0.0
        self._last_tokens = 0
        self.is_measuring = False
        """Whether the step planned last was a full one, so that it matters when the next is planned."""

    def planned(self, now: float, num_tokens: int, *, is_full: bool) -> None:
        """A step of so many tokens was planned at `now`. is_full: whether somebody is left waiting.

        Only full steps, and those that follow one, need be told.
        """
        if self.is_measuring:
            seconds = now - self._last_s
            decay = 0.5 ** (seconds / HALF_LIFE_S)
            self._tokens = self._tokens * decay + self._last_tokens
            self._seconds = self._seconds * decay + seconds
        self.is_measuring, self._last_s, self._last_tokens = is_full, now, num_tokens

    def answered(self, num_tokens: int) -> None:
        """A sequence ended with so many tokens generated; one with none was not answered, and does not count."""
        if num_tokens == 0:
            return
        self._answered_tokens = self._answered_tokens * _ANSWER_DECAY + num_tokens
        self._answers = self._answers * _ANSWER_DECAY + 1

    @property
    def tokens_per_s(self) -> float | None:
        """Of full steps; None before one was measured."""
        return self._tokens / self._seconds if self._tokens and self._seconds else None

    def seconds_for(self, num_sequences: float, num_prompt_tokens: float) -> float | None:
        """How long these keep a full engine busy, prompts and answers; None before that was measured."""
        if self._tokens == 0.0 or self._seconds == 0.0:
            return None
        num_answer_tokens = self._answered_tokens / self._answers if self._answers else 0.0
        return (num_prompt_tokens + num_sequences * num_answer_tokens) * self._seconds / self._tokens

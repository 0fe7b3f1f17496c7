"""Drafting: which sequences have tokens guessed for them, how many, and when that is worth a wait.

A draft is worth computing if it is likelier to be accepted than its price, as a share of what a token costs otherwise:

    price of a draft = seconds a token / (the step's base / rows + seconds a token and a row + seconds of its keys)
    i-th draft is made where acceptance ** i > price

So one stream, which pays the base alone, gets many drafts, and in a large batch, where nearly all of a step is tokens,
nobody gets any. How likely drafts are accepted is learned from guesses of each sequence, whether they were computed or
not: its own tokens say later which were right. What does not pay costs the guess alone, and is noticed when it would.

While tokens of a sequence are in flight nothing can be drafted behind them. One whose next tokens are guessed may wait
until they have landed: if more drafts are expected to be accepted than steps are lost.

Where an answer has a structure, what that forces comes first (foresight.py), and of a guess as much is drafted as the
structure allows; of a draft model's, which is not known here, nothing.
"""

from collections.abc import Sequence as Several
from typing import Final

from aserve.core.ids import SeqId
from aserve.core.plan import SeqSlice, StepPlan, num_agreeing
from aserve.core.ports import Proposer
from aserve.scheduler.foresight import Foresight
from aserve.scheduler.sequence import Sequence
from aserve.scheduler.step_cost import Prices, StepCost

FORGETS: Final = 0.8
"""What is left of a guess's weight after each later one of its sequence."""
FIRST_GUESS: Final = (1.0, 0.5)
"""Right and wrong drafts that count before anything is known of a sequence."""
HOPE: Final = 0.01
"""Where guesses have to be computed to be judged, and do not pay: of a record, what is forgotten at each token."""
PRICE: Final = 0.25
"""Of a draft, before step times are known."""
ROWS_A_REST: Final = 2
"""Who has no drafts is asked again after a position for each so many rows: of however many, some two in a step."""
ROWS_A_FORCED_REST: Final = 16
"""The same, where a structure may force tokens: these come in short runs, of which a rest of any length misses some."""
SHORTEST_REST: Final = 1
LONGEST_REST: Final = 16
"""And after twice as many as the last time, up to so many, as long as it is asked in vain."""
PRICE_OF_FORCED: Final = 0.5
"""Beyond, what a structure forces is not asked for: to find that out, and to wait, takes what it saves."""
FORCED_S: Final = 1.5e-3
"""What finding that out takes the host, in seconds, with setting up a batch that is not the last one moved on."""
STEPS_MISSED: Final = 2
"""By who waits for its tokens, among others who do not: one before its drafts are computed, and one after."""
CALLS_A_LOOK: Final = 64
"""Between two looks at what steps cost, which are worked out anew for each."""


class DraftCounts:
    """What became of drafts since the start.

    num_slices: with drafts, that have landed. num_drafts: of them. accepted_by_position: how many of those that came
    first behind a known token, second, and so on; empty where nobody has had drafts, and `most` is 0.
    """

    def __init__(self, most: int) -> None:
        self.num_slices = self.num_drafts = 0
        self.accepted_by_position = [0] * most

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """A slice with drafts has landed."""
        self.num_slices += 1
        self.num_drafts += num_drafts
        self.accepted_by_position += [0] * (num_accepted - len(self.accepted_by_position))
        for position in range(num_accepted):
            self.accepted_by_position[position] += 1


class Drafter:
    """proposer: whom to ask; with None nobody has drafts but those that a structure forces. cost: of steps."""

    def __init__(self, proposer: Proposer | None, cost: StepCost) -> None:
        self.counts = DraftCounts(0 if proposer is None else proposer.most)
        self.makes_steps = proposer is not None
        """Whether `steps` may have any."""
        self._proposer = proposer
        self._cost = cost
        self._prices: Prices | None = None
        self._num_calls = 0
        self._records: dict[SeqId, _Record] = {}
        self._foresights: dict[SeqId, Foresight] = {}

    def adopt(self, sequence: Sequence) -> None:
        """A sequence is new. It may have drafts if it is no beam: the search chooses."""
        if sequence.group is not None and sequence.group.beams is not None:
            return
        structure, proposer = sequence.request.structure, self._proposer
        if structure is not None:
            self._foresights[sequence.id] = Foresight(structure)
        if proposer is not None and (structure is None or proposer.foresees):
            self._records[sequence.id] = _Record()
        if structure is not None or proposer is not None:
            sequence.allow_drafts()

    def forget(self, seq_id: SeqId) -> None:
        """It has ended."""
        self._foresights.pop(seq_id, None)
        if self._proposer is not None and self._records.pop(seq_id, None) is not None:
            self._proposer.forget(seq_id)

    def rewind(self) -> None:
        """A step failed, or what was planned is not to be trusted: nothing that a draft model computed counts."""
        for foresight in self._foresights.values():
            foresight.forget()
        if self._proposer is not None and not self._proposer.foresees:
            for seq_id in self._records:
                self._proposer.forget(seq_id)

    def drafts_for(self, sequence: Sequence, most: int, num_rows: int) -> tuple[int, ...] | None:
        """At most so many drafts behind a sequence's next token; None if it is to wait until its tokens have landed.

        num_rows: how many sequences share the step.
        """
        self._look_at_prices()
        foresight, record = self._foresights.get(sequence.id), self._records.get(sequence.id)
        if foresight is not None and (drafts := self._forced(foresight, sequence, most, num_rows)) != ():
            return drafts
        drafts = () if record is None else self._guessed(sequence, record, most, num_rows)
        if drafts == ():
            sequence.rest_from_drafts(_rest(num_rows, foresight, record))
            return ()
        assert record is not None, "it was asked"
        record.rest = SHORTEST_REST
        if drafts and foresight is not None:
            drafts = foresight.possible(sequence, drafts)
        return drafts

    def steps(self, step_id: int, slices: Several[SeqSlice]) -> tuple[StepPlan, ...]:
        """What has to be computed so that the drafts of these slices come. See `Proposer.steps`."""
        return () if self._proposer is None else self._proposer.steps(step_id, slices)

    def seconds(self, plan: StepPlan) -> float:
        """What making a plan's drafts takes, if it has any steps for that."""
        assert self._proposer is not None, "somebody made the drafts"
        return sum(self._proposer.seconds(step.num_tokens) for step in plan.drafting)

    def verified(self, piece: SeqSlice, num_accepted: int) -> None:
        """A slice with drafts has landed."""
        num_drafts = piece.num_samples - 1
        self.counts.verified(num_drafts, num_accepted)
        if self._proposer is None or self._proposer.foresees:
            return
        if (record := self._records.get(piece.seq_id)) is not None:
            record.judge(num_accepted, num_drafts)

    def _forced(self, foresight: Foresight, sequence: Sequence, most: int, num_rows: int) -> tuple[int, ...] | None:
        """What the structure forces behind a sequence's next token, where it pays; None if that is to wait.

        One that is alone loses no step by waiting, and always does: most runs are of two or three tokens.
        """
        if self._price(sequence, num_rows, FORCED_S) > PRICE_OF_FORCED:
            return ()
        num_flying = sequence.num_computed + 1 - len(sequence.token_ids)
        if num_flying > 0 and num_rows == 1:
            return None
        forced = foresight.forced(sequence)
        if num_flying > 0:
            return None if len(forced) > num_flying + STEPS_MISSED else ()
        return forced[:most]

    def _look_at_prices(self) -> None:
        if self._num_calls % CALLS_A_LOOK == 0:  # who always has drafts never decodes without: roughly is what is known
            is_rough = self._proposer is not None and not self._proposer.foresees
            self._prices = self._cost.rough_prices() if is_rough else self._cost.prices()
        self._num_calls += 1

    def _guessed(self, sequence: Sequence, record: "_Record", most: int, num_rows: int) -> tuple[int, ...] | None:
        proposer, tokens = self._proposer, sequence.token_ids
        assert proposer is not None, "only who was adopted may have drafts"
        guess: tuple[int, ...] = ()
        if proposer.foresees:
            if record.guess:
                record.learn(tokens)
            guess = proposer.propose(sequence.id, tokens, proposer.most)
            if not guess:
                return ()
            record.note(guess, len(tokens))
        making_s = proposer.seconds(num_rows) / num_rows
        num_worth, num_expected = record.worth(self._price(sequence, num_rows, making_s), proposer.most)
        num_flying = sequence.num_computed + 1 - len(tokens)
        if num_flying > 0:
            return None if num_expected > num_flying else ()
        if not proposer.foresees:
            if not num_worth:
                record.hope()
            elif most:
                guess = proposer.propose(sequence.id, tokens, min(num_worth, most))
        return guess[: min(num_worth, most)]

    def _price(self, sequence: Sequence, num_rows: int, making_s: float = 0.0) -> float:
        """Of a draft, as a share of what a token of the sequence costs otherwise. making_s: what the guess takes."""
        if (prices := self._prices) is None:
            return PRICE
        own = prices.base / num_rows + prices.token + prices.row + prices.key * sequence.num_computed
        return (prices.token + making_s) / own if own else PRICE


def _rest(num_rows: int, foresight: Foresight | None, record: "_Record | None") -> int:
    """For how many positions one that was asked in vain is left alone."""
    if foresight is not None or record is None:
        return min(num_rows // ROWS_A_FORCED_REST, LONGEST_REST)
    rest = record.rest
    record.rest = min(2 * rest, LONGEST_REST)
    return min(max(num_rows // ROWS_A_REST, rest), LONGEST_REST)


class _Record:
    """What became of a sequence's guesses.

    guess: the one that is followed, of the tokens from a position on. rest: of how many positions, if asked in vain.
    """

    def __init__(self) -> None:
        self._right, self._wrong = FIRST_GUESS
        self.guess: tuple[int, ...] = ()
        self.rest = SHORTEST_REST
        self._position = 0

    def note(self, guess: tuple[int, ...], position: int) -> None:
        """The tokens from a position on are guessed. One guess at a time is followed to its end."""
        if not self.guess:
            self.guess, self._position = guess, position

    def learn(self, tokens: Several[int]) -> None:
        """See what became of the guess that is followed."""
        guess = self.guess
        num_known = min(len(tokens) - self._position, len(guess))
        if num_known <= 0:
            return
        num_right = num_agreeing(guess[:num_known], tokens[self._position : self._position + num_known])
        if num_right == num_known < len(guess):
            return  # right so far
        self.judge(num_right, len(guess))
        self.guess = ()

    def judge(self, num_right: int, num_drafts: int) -> None:
        """Of so many drafts so many were right, from the first on."""
        self._right = self._right * FORGETS + num_right
        self._wrong = self._wrong * FORGETS + (num_right < num_drafts)

    def hope(self) -> None:
        """Nothing is guessed, so that nothing is learned: by and by it is tried again."""
        right, wrong = FIRST_GUESS
        self._right += HOPE * (right - self._right)
        self._wrong += HOPE * (wrong - self._wrong)

    def worth(self, price: float, most: int) -> tuple[int, float]:
        """How many drafts are worth their price, and how many of them will be accepted."""
        acceptance = self._right / (self._right + self._wrong)
        num_worth, num_expected, likelihood = 0, 0.0, acceptance
        while num_worth < most and likelihood > price:
            num_worth += 1
            num_expected += likelihood
            likelihood *= acceptance
        return num_worth, num_expected

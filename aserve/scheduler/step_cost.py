"""StepCost: how long a step will take, learned from those that landed. Told times and plans; reads no clock.

    seconds = base + per_token * tokens + per_row * rows + per_key * keys read        none of the four below 0

Keys are read once for each tile of 128 queries, as attention kernels read them: by a decoding row its whole context, by
a chunk of 512 tokens at the end of one of 2,048 four times 2,048. The fit is by least squares over relative errors, so
that a step of 5 ms counts as much as one of 500, older steps counting ever less. An error is relative to what the step
took or was expected to take, whichever is longer: where the landing of one step is noticed only when the next one has
landed too, that one seems to have taken 0.06 ms in place of 2, and would else count a thousand times. Steps that only
decode are told apart from those with prompts, of which there may be few: each kind is forgotten at its own pace.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from math import inf
from typing import Final, NamedTuple

from aserve.core.graph_sizes import GraphSizes
from aserve.core.plan import SeqSlice
from aserve.scheduler.sequence import Sequence

QUERY_TILE: Final = 128
HALF_LIFE_STEPS: Final = 32
"""Of what was learned: after so many steps of a kind one counts half."""
DECODES_PER_LOOK: Final = 8
"""Of the steps that only decode, which are alike, at most one in so many is learned from."""
LEARN_EVERY_S: Final = 0.02
"""And not before steps have taken so long together: to learn takes longer than all else that is done for a token."""
AUTO_FACTOR: Final = 2.5
"""How much longer than without prompts a step may take in which somebody decodes, where no target is set."""
UNNOTICED_S: Final = 0.01
"""And so long it may take in any case: a hundred tokens a second are more than anybody reads. A model whose steps take
half a millisecond would else compute a prompt of 100 tokens in four steps, for the sake of 2 ms."""
LEAST_SHARE: Final = 16
"""One in so many tokens of a step's budget is for prompts, however long those who decode have to wait for that."""
AUTO_LEAST_SHARE: Final = 48
"""The same where no target is set, for each time that a step may take longer: 3 in 48 where it may take 4 times as
long. More is often more than fits into that time, and then those who decode wait for longer than they should."""
LATE_SHARE: Final = 0.01
"""Of the tokens of answers: so many may come later than the target, so that the 99th percentile keeps to it."""
MAX_LATE: Final = 20.0
"""Late tokens that are saved up at most while none is late; as many may be late at first."""
LATE_S: Final = 0.25
"""A full step may take, at most, for tokens to be late: a wait that is hardly noticed. A large model's on a CPU takes
seconds."""
DECODES_PER_NEWCOMER: Final = 2
"""So many who decode wait for one newcomer: its first token is late by all of its prompt, theirs by one step."""
MIN_PROMPT_STEPS: Final = 3
"""With prompts, before anything is predicted."""
NUM_FITS: Final = 8
"""Of steps that are all known, each of which expects what the one before it has found."""

_DECAY: Final = 0.5 ** (1 / HALF_LIFE_STEPS)
_RIDGE: Final = 1e-9
"""Of the diagonal: which of two features counts that were never seen apart is then decided, and not divided by 0."""
_ROW: Final = 2
"""The place of rows among the features."""
_ROW_RIDGE: Final = 0.3
"""Theirs, over the number of steps. Of one row that decodes it cannot be told what the row takes, and what the step:
were it the row, four would take four times as long, and others' prompts might take as much beside them."""

Vector = list[float]


class Load(NamedTuple):
    """What a step computes. tokens: all, padding included. rows: sequences. keys: read, as above."""

    tokens: float
    rows: float
    keys: float

    @staticmethod
    def of(slices: Iterable[SeqSlice], graph_sizes: GraphSizes | None = None) -> "Load":
        """That of a plan's slices. graph_sizes: of steps with prompts that are padded; those with drafts are not."""
        tokens = rows = keys = num_decodes = num_drafted = 0
        for piece in slices:
            tokens += piece.num_tokens
            rows += 1
            num_decodes += piece.num_tokens == 1
            num_drafted += piece.num_samples > 1
            keys += (piece.start + piece.num_tokens) * -(-piece.num_tokens // QUERY_TILE)
        if graph_sizes is not None and num_decodes < rows and not num_drafted:
            size = graph_sizes.choose(num_decodes, rows - num_decodes, tokens - num_decodes)
            tokens = tokens if size is None else sum(size)
        return Load(tokens, rows, keys)


class Prices(NamedTuple):
    """Seconds, of a step, a token, a row and a key."""

    base: float
    token: float
    row: float
    key: float

    def of(self, load: Load) -> float:
        """Seconds that a step takes."""
        return self.base + self.token * load.tokens + self.row * load.rows + self.key * load.keys


class _Moments:
    """Decayed sums of one kind of steps, over their features and seconds divided by a scale: of products.

    mean_s: what a step took, on average.
    """

    def __init__(self, decay: float = _DECAY) -> None:
        self._decay = decay
        self.products: list[Vector] = [[0.0] * 4 for _ in range(4)]
        self.sums: Vector = [0.0] * 4
        self.num_steps = 0
        self.mean_s = 0.0

    def add(self, load: Load, seconds: float, expected_s: float | None) -> None:
        """One more step. expected_s: what it should have taken; None where that is not known yet."""
        self.num_steps += 1
        self.mean_s += (seconds - self.mean_s) / self.num_steps
        scale = max(seconds, self.mean_s if expected_s is None else expected_s)
        features = (1.0 / scale, load.tokens / scale, load.rows / scale, load.keys / scale)
        relative = seconds / scale
        for i, x in enumerate(features):
            row = self.products[i]
            for j, y in enumerate(features):
                row[j] = row[j] * self._decay + x * y
            self.sums[i] = self.sums[i] * self._decay + x * relative


class StepCost:
    """The model. error: of its predictions, as a share of what the steps took or should have taken, the longer of the
    two, averaged over the latest ones.

    num_rows: of all steps that have landed, where those that were not learned from were like the next that was.
    graph_sizes: of steps that a GPU launches by one call, padded; None where there are none.
    """

    def __init__(self, graph_sizes: GraphSizes | None = None) -> None:
        self.graph_sizes = graph_sizes
        self.error = 0.0
        self.num_rows = 0
        self._decodes, self._prompts = _Moments(), _Moments()
        self._prices: Prices | None = None
        self._is_stale = False

    def landed(self, slices: Several[SeqSlice], seconds: float, num_steps: int = 1) -> None:
        """A step has landed that took so long, by itself; the last of so many since the one learned from before."""
        if not slices or seconds <= 0.0:
            return
        self.num_rows += len(slices) * num_steps
        has_prompt = slices[-1].num_tokens > 1 or slices[0].num_tokens > 1
        load = Load.of(slices, self.graph_sizes)
        expected_s = None
        if (prices := self._prices or self.prices()) is not None:
            expected_s = prices.of(load)
            self.error += (1 - _DECAY) * (abs(expected_s - seconds) / max(expected_s, seconds) - self.error)
        (self._prompts if has_prompt else self._decodes).add(load, seconds, expected_s)
        self._is_stale = True

    def prices(self) -> Prices | None:
        """As fitted to all steps so far; None before there were enough, of both kinds."""
        return self.rough_prices() if self._decodes.num_steps else None

    def rough_prices(self) -> Prices | None:
        """As `prices`, also while no step was seen that only decodes."""
        if self._is_stale and self._prompts.num_steps >= MIN_PROMPT_STEPS:
            row_ridge = _ROW_RIDGE / (self._decodes.num_steps + self._prompts.num_steps)
            self._prices = _fit(self._decodes, self._prompts, row_ridge=row_ridge)
            self._is_stale = False
        return self._prices


class Allowance:
    """Prompt tokens that a step may compute beside those who decode. least: in any case, so that prompts get on.

    filling: rounds them down to what fills a graph; None where there are no graphs.
    """

    def __init__(self, prices: Prices, spare_s: float, least: float, filling: "Filling | None" = None) -> None:
        self._prices = prices
        self._spare_s = spare_s
        self._least = least
        self._filling = filling

    @property
    def is_spent(self) -> bool:
        """Whether not one more token of any prompt may be computed."""
        if self._filling is not None and self._filling.is_over:
            return True
        return not self._least and self._spare_s < self._prices.row + self._prices.token + self._prices.key

    @property
    def is_overdrawn(self) -> bool:
        """Whether the step will take longer than it should."""
        return self._spare_s < 0.0

    def take(self, start: int, num_wanted: int) -> int:
        """Of the next `num_wanted` tokens of a prompt, from position `start` on, how many there are: 0 if none."""
        prices = self._prices
        row_s = prices.row + prices.key * start
        token_s = prices.token + prices.key * (1 + start / QUERY_TILE)
        num_affordable = (self._spare_s - row_s) / token_s if token_s else inf
        num_allowed = max(num_affordable, self._least)
        num_taken = int(min(num_wanted, num_allowed))
        if self._filling is not None:
            num_taken = self._filling.take(num_wanted, num_taken, num_allowed)
        self._spare_s -= row_s + num_taken * token_s
        self._least = max(0, self._least - num_taken)
        return num_taken


class Filling:
    """Fills a graph with the prompts of a step, one after another. num_newcomers: how many have prompts to compute.

    The last of them, or the first that is too long, is cut to where a graph is full. margin: tokens that the step had
    better not compute, though it may, since it may take longer than expected.
    """

    def __init__(self, sizes: GraphSizes, num_decodes: int, num_newcomers: int, margin: float = 0.0) -> None:
        self._sizes = sizes
        self._margin = margin
        self._num_decodes = num_decodes
        self._num_newcomers = num_newcomers
        self._num_prompts = self._num_tokens = 0
        self.is_over = False
        """Whether the step has all the prompts that it will have."""

    def take(self, num_wanted: int, num_taken: int, num_allowed: float) -> int:
        """How many tokens of the next prompt are computed, which wants so many, and would get `num_taken` of them.

        num_allowed: tokens that the step may compute besides those before this prompt.
        """
        if self.is_over or not num_taken:
            return 0
        self._num_prompts += 1
        num_before, num_tokens = self._num_tokens, self._num_tokens + num_taken
        self.is_over = num_taken < num_wanted or self._num_prompts >= self._num_newcomers
        limit = num_before + num_allowed - self._margin
        filled = self._sizes.fill(self._num_decodes, self._num_prompts, num_tokens, limit, is_all=self.is_over)
        self.is_over |= filled < num_tokens
        self._num_tokens = max(num_before, filled)
        return self._num_tokens - num_before


class StreamPace:
    """Keeps those who decode from waiting for others' prompts: how many prompt tokens fit beside them in a step.

    target_s: what a step may take in which somebody decodes; None for `factor` times as long as it would take
    without prompts, or 10 ms if that is longer; 0 for any length. However long that takes, such a step computes a share
    of `budget`, its tokens, of prompts, so that who waits with n tokens of prompts before its first token waits for
    n / share steps at most.

    Where no target is set, one token in a hundred may come late, and these are spent where most is gained by it: while
    at least half as many newcomers wait as others decode, a step is filled with prompts, unless that takes longer than
    `LATE_S`. A wave of 32 prompts of a small model is then computed in two or three steps, while next to nobody
    decodes, and not piece by piece for as long as it is decoded.
    """

    def __init__(self, cost: StepCost, target_s: float | None, budget: int, factor: float = AUTO_FACTOR) -> None:
        self._cost = cost
        self._target_s = target_s
        self._budget = budget
        self._factor = factor
        share = 1 / LEAST_SHARE if target_s is not None else (factor - 1.0) / AUTO_LEAST_SHARE
        self._least = max(1, int(budget * share))
        self._num_late = MAX_LATE
        """Tokens that may still be late."""
        self._num_seen = 0
        self._full: tuple[Allowance, int] | None = None
        """Of a step that may be late, and who decode in it."""

    def allowance(self, decoding: Iterable[Sequence], num_newcomers: int = 1) -> Allowance | None:
        """For a step in which these decode, while so many wait for their first token, or have begun their prompts.

        None where there is no limit, or where the costs are not known yet.
        """
        if self._target_s == 0.0 or (prices := self._cost.prices()) is None:
            return None
        num_rows = num_keys = 0
        for sequence in decoding:
            num_rows += 1
            num_keys += sequence.num_computed
        if not num_rows:
            return None
        decode_s = prices.of(Load(num_rows, num_rows, num_keys))
        step_s = self._target_s or max(self._factor * decode_s, UNNOTICED_S)
        spare_s, filling, sizes = step_s - decode_s, None, self._cost.graph_sizes
        if sizes is not None:
            margin = self._cost.error * step_s / prices.token if prices.token else 0.0
            filling = Filling(sizes, num_rows, num_newcomers, margin)
        if self._target_s is not None:
            return Allowance(prices, spare_s, self._least, filling)
        is_long = decode_s + prices.token * self._budget > LATE_S
        if is_long or DECODES_PER_NEWCOMER * num_newcomers < num_rows or self._may_be_late() < num_rows:
            return Allowance(prices, spare_s, self._least, filling)
        allowance = Allowance(prices, spare_s, inf)
        self._full = allowance, num_rows
        return allowance

    def _may_be_late(self) -> float:
        """How many tokens may be late now, those of the last step that was to be filled taken off."""
        num_rows, self._num_seen = self._cost.num_rows - self._num_seen, self._cost.num_rows
        if self._full is not None:
            allowance, num_decoding = self._full
            self._num_late -= num_decoding if allowance.is_overdrawn else 0
            self._full = None
        self._num_late = min(MAX_LATE, self._num_late + LATE_SHARE * num_rows)
        return self._num_late


def prices_of(steps: Iterable[tuple[Load, float]]) -> Prices:
    """Fitted to steps and the seconds that each took, all of which count the same. Needs one at least."""
    steps, prices = tuple(steps), None
    for _ in range(NUM_FITS):
        moments = _Moments(decay=1.0)
        for load, seconds in steps:
            moments.add(load, seconds, None if prices is None else prices.of(load))
        prices = _fit(moments)
    assert prices is not None
    return prices


def _fit(*kinds: _Moments, row_ridge: float = _RIDGE) -> Prices:
    """The four prices of the least relative error, none of them negative: what would be is left out.

    row_ridge: how much the price of a row is held back, as a share of its part in the squares.
    """
    products = [[sum(kind.products[i][j] for kind in kinds) for j in range(4)] for i in range(4)]
    sums = [sum(kind.sums[i] for kind in kinds) for i in range(4)]
    products[_ROW][_ROW] *= 1.0 + row_ridge
    used = list(range(4))
    while True:
        found = _solve([[products[i][j] for j in used] for i in used], [sums[i] for i in used])
        lowest = min(range(len(used)), key=lambda i: found[i])
        if found[lowest] >= 0.0:
            prices = dict(zip(used, found, strict=True))
            return Prices(*(prices.get(i, 0.0) for i in range(4)))
        del used[lowest]


def _solve(matrix: list[Vector], right: Vector) -> Vector:
    """x of matrix x = right, symmetric and not negative, by elimination."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        rows[i][i] += _RIDGE * rows[i][i] or 1.0
    for i in range(size):
        for k in range(i + 1, size):
            factor = rows[k][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[k][j] -= factor * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found

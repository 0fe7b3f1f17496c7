"""Drafts leave the distribution of tokens what it is without them: chi-square over draws of a model that is known.

The model looks at one token only, so that the probabilities of the next are a table's row, filtered as this file says
it. Requests run through scheduler and runner; every pair of a token and its successor is a draw.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from aserve.core.ids import SeqId
from aserve.core.speculation import StepSeconds
from aserve.drafting.draft_model import DraftModelProposer
from aserve.kernels.cpu import CpuOps
from aserve.kernels.ops import KVLayer
from aserve.models.interface import ForwardBatch
from aserve.runner import sampler
from aserve.runner.draft_model import DraftModel
from aserve.runner.kv_store import allocate_kv
from aserve.runner.runner import ModelRunner
from aserve.runner.verification import Drafts, count_accepted
from aserve.scheduler.drafting import Drafter
from aserve.scheduler.scheduler import Scheduler
from tests.fakes import Foreseer
from tests.runner.toy import VOCAB_SIZE, ToyLM, answer, request

pytestmark = [pytest.mark.torch, pytest.mark.slow]

Table = NDArray[np.float64]

NUM_WORDS = 12
"""Tokens that are ever likely, of the toy's vocabulary."""
NUM_TOKENS = 8
"""Of an answer: each but the first is drawn behind a token that is known to be the one before it."""
SAMPLINGS = {
    "half as hot": {"temperature": 0.5},
    "as it is": {"temperature": 1.0},
    "hotter": {"temperature": 1.7},
    "top-k": {"temperature": 1.2, "top_k": 4},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "min-p": {"temperature": 0.8, "min_p": 0.15},
}
UNLIKELY = 5.5
"""Standard deviations: a right sampler is beyond them once in 50 million runs."""


class MarkovLM:
    """A `CausalLM` whose logits are a table's row, by the last token."""

    spec = ToyLM.spec

    def __init__(self, seed: int, *, noise: float = 0.0) -> None:
        """noise: how much another table with the same seed differs from it."""
        logits = torch.randn((VOCAB_SIZE, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * 1.5
        logits += noise * torch.randn((VOCAB_SIZE, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed + 1))
        logits[:, NUM_WORDS:] = -100.0
        self.logits_VV = logits

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        del kv
        return batch.wanted(token_ids_T[:, None].double())

    def logits(self, hidden_SE: Tensor) -> Tensor:
        return self.logits_VV[hidden_SE[:, 0].long()].clone()


class LikelyGuesser(Foreseer):
    """Guesses the likeliest successors mostly, and others now and then."""

    most = 3

    def __init__(self, model: MarkovLM) -> None:
        self._successors = model.logits_VV.argmax(1).tolist()

    def propose(self, seq_id: SeqId, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        rng = random.Random(f"{seq_id} {len(token_ids)}")
        guess = [token_ids[-1]]
        while len(guess) <= most:
            guess.append(self._successors[guess[-1]] if rng.random() < 0.8 else rng.randrange(NUM_WORDS))
        return tuple(guess[1:])

    def forget(self, seq_id: SeqId) -> None:
        """It keeps nothing."""


def probabilities(
    logits_VV: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Table:
    """Of each token behind each: the softmax, with one filter."""
    table = np.exp(logits_VV[:NUM_WORDS, :NUM_WORDS].double().numpy() / temperature)
    table /= table.sum(1, keepdims=True)
    for row in table:
        order = np.argsort(-row)
        keep = np.ones(NUM_WORDS, bool)
        if top_k:
            keep[order[top_k:]] = False
        if top_p < 1.0:
            keep[order[1:][np.cumsum(row[order])[:-1] >= top_p]] = False
        keep &= row >= min_p * row.max()
        row *= keep
    return table / table.sum(1, keepdims=True)


def draws(sampling: dict[str, float], num_requests: int, method: str) -> tuple[Table, Table, float]:
    """How often each token came behind each, the model's probabilities, and the share of drafts that were accepted."""
    model = MarkovLM(3)
    cpu = torch.device("cpu")
    sizes = {"num_blocks": 600, "block_size": 16}
    kv = allocate_kv(model.spec, **sizes, dtype=torch.float32, device=cpu)
    runner = ModelRunner(model, CpuOps(), kv, max_num_seqs=128, max_model_len=64)
    proposer: LikelyGuesser | DraftModelProposer = LikelyGuesser(model)
    if method == "draft_model":
        own_kv = allocate_kv(model.spec, **sizes, dtype=torch.float32, device=cpu)
        small = MarkovLM(3, noise=0.5)
        runner.draft_with(
            lambda device: DraftModel(small, CpuOps(), own_kv, device, num_rows=128, max_model_len=64, most=3)
        )
        limits = {"num_rows": 128, "context_len": 64, "max_catch_up": 2048, "step_seconds": StepSeconds(0.0, 0.0)}
        proposer = DraftModelProposer(most=3, **sizes, **limits)  # type: ignore[arg-type]
    limits = {"max_num_seqs": 128, "max_num_batched_tokens": 2048, "max_model_len": 64, "max_in_flight": 2}
    scheduler = Scheduler(**sizes, **limits, proposer=proposer)  # type: ignore[arg-type]
    requests = [
        request(f"r{i}", [i % NUM_WORDS], max_tokens=NUM_TOKENS, seed=i, **sampling) for i in range(num_requests)
    ]
    answers = asyncio.run(answer(runner, scheduler, requests, depth=2))
    counts = np.zeros((NUM_WORDS, NUM_WORDS))
    for one in requests:
        tokens = [*one.prompt_token_ids, *(answers[one.id] or ())]
        assert len(tokens) == 1 + NUM_TOKENS
        np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    statistics = scheduler.statistics()
    assert statistics.num_drafts > num_requests, "drafts were computed"
    accepted = sum(statistics.num_accepted_by_position) / statistics.num_drafts
    return counts, probabilities(model.logits_VV, **sampling), accepted


def deviations(counts: Table, table: Table) -> float:
    """How far counts are from what the table says, in standard deviations of a chi-square (Wilson and Hilferty, 1931).

    Cells that few draws are expected in are taken together, those of each token with its likeliest successor.
    """
    chi_square, freedom = 0.0, 0
    for row, likely in zip(counts, table * counts.sum(1, keepdims=True), strict=True):
        few = likely < 5.0
        few[likely.argmax()] = True
        observed, expected = [*row[~few], row[few].sum()], [*likely[~few], likely[few].sum()]
        chi_square += sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True) if e)
        freedom += len(observed) - 1
    scale = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - scale)) / scale**0.5)


def check(names: Iterable[str], num_draws: int, method: str) -> None:
    for name in names:
        counts, table, accepted = draws(SAMPLINGS[name], num_draws // NUM_TOKENS, method)
        assert counts.sum() == num_draws
        assert not counts[table == 0.0].any(), f"{name}: what a filter leaves out never comes"
        assert abs(deviations(counts, table)) < UNLIKELY, f"{name}, {method}"
        assert 0.1 < accepted < 0.95, f"{name}, {method}: drafts of both kinds were verified"


@pytest.fixture(autouse=True)
def drafts_at_any_price(monkeypatch):
    monkeypatch.setattr(Drafter, "_price", lambda *_: 0.0)


@pytest.mark.parametrize("method", ["guesses", "draft_model"])
def test_tokens_are_distributed_as_the_model_says(method):
    check(("as it is", "top-p"), 8_000, method)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["guesses", "draft_model"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_hundred_thousand_tokens_are_distributed_as_the_model_says(name, method):
    check((name,), 100_000, method)


def test_a_verification_that_takes_what_is_guessed_is_noticed(monkeypatch):
    """The test of the test: of each slice the first draft is accepted, whatever was sampled."""

    def count(ids_N: Tensor, drafts: Drafts) -> Tensor:
        ids_N.index_copy_(0, drafts.samples_SK[:, 0], drafts.draft_ids_SJ[:, 0].clamp(min=0))
        return count_accepted(ids_N, drafts)

    monkeypatch.setattr(sampler, "count_accepted", count)
    counts, table, _ = draws(SAMPLINGS["as it is"], 500, "guesses")
    assert abs(deviations(counts, table)) > 2 * UNLIKELY

import pytest
import torch

from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast, sampling

pytestmark = pytest.mark.torch
TWIN = ReferenceOps()
FILTERS = {
    "none": {},
    "top_k": {"top_k": 5},
    "top_k over the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
}


@pytest.mark.parametrize("vocab_size", [1, 100, 5000])
@pytest.mark.parametrize("filters", FILTERS)
def test_sampling(sampler: Fast, vocab_size: int, filters: str) -> None:
    logits = sampler.randn(4, vocab_size) * 4
    batch = sampling(4, temperature=[0.7, 1.0, 0.0, 2.0], device=sampler.device, **FILTERS[filters])
    assert torch.equal(sampler.ops.sample(logits, batch), TWIN.sample(logits, batch))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("filters", ["none", "all"])
def test_half_precision_logits_need_no_copy(sampler: Fast, dtype: torch.dtype, filters: str) -> None:
    """They are read as they are, and give what the same numbers give in float32."""
    logits = sampler.randn(4, 5000).mul(4).to(dtype)
    batch = sampling(4, temperature=[0.7, 1.0, 0.0, 2.0], device=sampler.device, **FILTERS[filters])
    assert torch.equal(sampler.ops.sample(logits, batch), TWIN.sample(logits.float(), batch))


def test_every_row_has_its_own_filters(sampler: Fast) -> None:
    logits = sampler.randn(6, 300) * 2
    batch = sampling(
        6,
        temperature=[1.0, 0.0, 0.5, 1.0, 1.5, 1.0],
        top_k=[0, 3, 40, 1, 0, 300],
        top_p=[1.0, 0.5, 0.9, 1.0, 0.3, 1.0],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.2, 0.0],
        device=sampler.device,
    )
    assert torch.equal(sampler.ops.sample(logits, batch), TWIN.sample(logits, batch))


def test_greedy_takes_the_lowest_of_equal_logits(sampler: Fast) -> None:
    logits = torch.zeros(3, 5000)
    logits[0, [4999, 4097, 1200]] = 2.0
    logits[1, [1023, 1024]] = 1.0
    tokens = sampler.ops.sample(logits.to(sampler.device), sampling(3, temperature=0.0, device=sampler.device))
    assert tokens.tolist() == [1200, 1023, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_sampled(sampler: Fast, temperature: float) -> None:
    logits = sampler.randn(3, 40)
    best = logits.argsort(dim=1, descending=True)
    banned = [[int(best[0, 0]), int(best[0, 1])], [int(best[1, 0]), -1], [-1, -1]]
    batch = sampling(3, temperature=temperature, top_k=1, banned=banned, device=sampler.device)
    before = logits.clone()
    assert sampler.ops.sample(logits, batch).tolist() == [int(best[0, 2]), int(best[1, 1]), int(best[2, 0])]
    assert torch.equal(logits, before)


def test_what_is_banned_has_no_mass_in_its_own_row(sampler: Fast) -> None:
    """Of rows that filter nothing: one that took another's banned ids would draw from what it may not have."""
    logits = torch.zeros(5, 5000)
    likeliest = [7, 4100, 1300, 2, 900]
    logits[range(5), likeliest] = 14.0
    batch = sampling(5, banned=[[id, -1, -1] for id in likeliest], device=sampler.device)
    tokens = sampler.ops.sample(logits.to(sampler.device), batch)
    assert torch.equal(tokens, TWIN.sample(logits.to(sampler.device), batch))
    assert not set(tokens.tolist()) & {-1, *likeliest}


def test_equal_weights_share_one_fate(sampler: Fast) -> None:
    """Of five equal logits top_k 2 keeps all: which to drop would be arbitrary."""
    logits = torch.full((12, 50), -9.0)
    logits[:, [3, 11, 17, 30, 49]] = 1.0
    batch = sampling(12, top_k=2, top_p=0.1, device=sampler.device)
    assert set(sampler.ops.sample(logits.to(sampler.device), batch).tolist()) == {3, 11, 17, 30, 49}


@pytest.mark.parametrize("spread", [0.0, 0.3, 8.0, 60.0])
@pytest.mark.parametrize("filters", ["top_k", "top_p", "all"])
def test_flat_and_peaked_distributions(sampler: Fast, spread: float, filters: str) -> None:
    """From so many alike that none can be set aside, to all the mass in a few tokens.

    Logits are multiples of 1/4: which of two neighbours is the nucleus's edge should not hang on the last bit of exp.
    """
    logits = (sampler.randn(2, 10000) * spread * 4).round() / 4
    batch = sampling(2, device=sampler.device, **FILTERS[filters])
    assert torch.equal(sampler.ops.sample(logits, batch), TWIN.sample(logits, batch))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.39, {0}), (0.41, {0, 1}), (0.69, {0, 1}), (0.71, {0, 1, 2}), (1, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(sampler: Fast, top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(12, 1).to(sampler.device)
    tokens = sampler.ops.sample(logits, sampling(12, top_p=top_p, device=sampler.device))
    assert set(tokens.tolist()) == kept


@pytest.mark.parametrize(("top_p", "kept"), [(0.57, {0}), (0.58, {0, 1})])
def test_top_p_counts_what_top_k_left(sampler: Fast, top_p: float, kept: set[int]) -> None:
    """0.4 and 0.3 are left, renormalised 0.571 and 0.429."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(12, 1).to(sampler.device)
    tokens = sampler.ops.sample(logits, sampling(12, top_k=2, top_p=top_p, device=sampler.device))
    assert set(tokens.tolist()) == kept


def test_a_token_depends_on_its_seed_and_position_alone(sampler: Fast) -> None:
    row = sampler.randn(1, 2000)
    seeds, positions = [5, -(2**63), 2**63 - 1, 5, 0], [3, 3, 2**33, 4, 0]
    crowd = sampling(5, seeds=seeds, positions=positions, top_p=[0.9, 1.0, 1.0, 0.9, 1.0], device=sampler.device)
    together = sampler.ops.sample(row.expand(5, -1).contiguous(), crowd).tolist()
    for s in range(5):
        alone = sampling(
            1, seeds=[seeds[s]], positions=[positions[s]], top_p=[0.9, 1.0, 1.0, 0.9, 1.0][s], device=sampler.device
        )
        assert sampler.ops.sample(row, alone).tolist() == [together[s]]


@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_samples_follow_the_distribution(sampler: Fast, vary: str) -> None:
    """Pearson's chi-square over 11 tokens: 29.6 is passed by chance once in 1000 (10 degrees of freedom)."""
    num_rows = 50 if sampler.interpreted else 5000
    logits = torch.linspace(-1.0, 2.0, 11).roll(4)
    numbers = {"seeds": [42] * num_rows, "positions": [7] * num_rows, vary: range(num_rows)}
    batch = sampling(num_rows, temperature=0.8, device=sampler.device, **numbers)
    tokens = sampler.ops.sample(logits.repeat(num_rows, 1).to(sampler.device), batch)
    observed = tokens.cpu().bincount(minlength=11).double()
    expected = (logits.double() / 0.8).softmax(0) * num_rows
    assert ((observed - expected).square() / expected).sum() < 29.6


def test_a_banned_likeliest_token_leaves_a_distribution(sampler: Fast) -> None:
    logits = torch.tensor([[8.0, 0.0, 0.0]]).repeat(30, 1).to(sampler.device)
    counts = sampler.ops.sample(logits, sampling(30, banned=[[0]] * 30, device=sampler.device)).bincount(minlength=3)
    assert counts[0] == 0
    assert 5 < counts[1] < 25

"""Sampling at the edge of arithmetic: extreme logits under extreme parameters, and rows that cannot be sampled."""

import math
from itertools import product

import pytest
import torch

from aserve.core.params import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from aserve.kernels.ops import NO_TOKEN
from aserve.kernels.reference import ReferenceOps
from tests.kernels.cases import Fast, controls, sampling

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # of numpy, which interprets Triton
]
TWIN = ReferenceOps()
VOCAB_SIZE = 37
LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def extreme_rows(largest: float) -> torch.Tensor:
    """Rows whose logits are the largest, the smallest, and what lies between: float32 as the sampler gets them."""
    noise = torch.linspace(-1, 1, VOCAB_SIZE)
    alone = torch.full((VOCAB_SIZE,), -math.inf)
    alone[3] = -largest
    rows = (
        *(noise * largest, torch.full((VOCAB_SIZE,), largest), torch.full((VOCAB_SIZE,), -largest), alone),
        *(torch.where(noise > 0, largest, -largest), noise * 1e-44, torch.zeros(VOCAB_SIZE)),
    )
    return torch.stack(rows).float()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("repetition", [MIN_REPETITION_PENALTY, 0.5, MAX_REPETITION_PENALTY])
def test_what_is_finite_stays_finite_under_every_control(sampler: Fast, dtype: torch.dtype, repetition: float) -> None:
    logits = extreme_rows(LARGEST[dtype]).to(sampler.device)
    num_rows = len(logits)
    often = {i: (0, 1, 2, 2**21 + 1)[i % 4] for i in range(VOCAB_SIZE)}
    signs = [1 if row % 2 else -1 for row in range(num_rows)]
    batch = controls(
        range(num_rows),
        vocab_size=VOCAB_SIZE,
        bias={q: {0: 100.0, 1: -100.0, 2: -math.inf} for q in range(num_rows)},
        counts=dict.fromkeys(range(num_rows), often),
        repetition=[repetition] * num_rows,
        presence=[2.0 * sign for sign in signs],
        frequency=[2.0 * sign for sign in signs],
        banned=[[5]] * num_rows,
        device=sampler.device,
    )
    expected, actual = logits.clone(), logits.clone()
    TWIN.control_logits(expected, batch)
    sampler.ops.control_logits(actual, batch)
    torch.testing.assert_close(actual, expected)
    may_be_infinite = logits.isinf()
    may_be_infinite[:, [2, 5]] = True
    assert (actual.isfinite() | may_be_infinite).all()
    assert not actual.isnan().any()
    assert (actual[may_be_infinite] == -math.inf).all()


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_every_finite_row_yields_a_token_under_every_filter(sampler: Fast, dtype: torch.dtype) -> None:
    temperatures, top_ps = (0.0, 1e-5, 2.0), (1.4e-45, 0.0, 1e-6, 0.5, 1.0)  # 1e-300 is 0.0 as a float32
    top_ks, min_ps = (0, 1, VOCAB_SIZE), (0.0, 1.4e-45, 1.0)
    all_cases = list(product(temperatures, top_ps, top_ks, min_ps))
    first = 19 * list(LARGEST).index(dtype)
    for index, row in enumerate(extreme_rows(LARGEST[dtype])):
        cases = all_cases[first + index :: 58] if sampler.interpreted else all_cases  # others for each type
        temperature, top_p, top_k, min_p = zip(*cases, strict=True)
        logits = row.repeat(len(cases), 1).to(sampler.device)
        batch = sampling(
            len(cases), temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, device=sampler.device
        )
        tokens = sampler.ops.sample(logits, batch)
        assert torch.equal(tokens, TWIN.sample(logits, batch))
        assert ((tokens >= 0) & (tokens < VOCAB_SIZE)).all()
        assert logits.gather(1, tokens[:, None]).isfinite().all()


def unsamplable_rows() -> torch.Tensor:
    rows = torch.zeros(5, VOCAB_SIZE)
    rows[0, 7] = math.nan
    rows[1] = math.nan
    rows[2, 9] = math.inf
    rows[3] = -math.inf
    rows[4, :-1] = -math.inf  # and the last is banned
    return rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5}, {"top_k": 3, "min_p": 0.1}], ids=str)
def test_a_row_that_cannot_be_sampled_says_so_and_alters_no_other(
    sampler: Fast, temperature: float, filters: dict[str, float]
) -> None:
    good = sampler.randn(5, VOCAB_SIZE).cpu()
    mixed = torch.stack([row for pair in zip(good, unsamplable_rows(), strict=True) for row in pair]).to(sampler.device)
    banned = [[VOCAB_SIZE - 1]] * 10
    options = {"temperature": temperature, **filters, "device": sampler.device}
    together = sampler.ops.sample(mixed, sampling(10, banned=banned, **options))
    assert torch.equal(together, TWIN.sample(mixed, sampling(10, banned=banned, **options)))
    assert together[1::2].tolist() == [NO_TOKEN] * 5
    alone = sampling(5, banned=banned[:5], seeds=range(0, 10, 2), **options)
    assert torch.equal(together[::2], sampler.ops.sample(good.to(sampler.device), alone))
    only_bad = sampling(5, banned=banned[:5], **options)
    assert sampler.ops.sample(unsamplable_rows().to(sampler.device), only_bad).tolist() == [NO_TOKEN] * 5


def test_controls_do_not_hide_what_is_not_finite(sampler: Fast) -> None:
    logits = unsamplable_rows()[:4].to(sampler.device)
    batch = controls(
        range(4),
        vocab_size=VOCAB_SIZE,
        bias={q: {0: 1.0} for q in range(4)},
        counts={q: dict.fromkeys(range(VOCAB_SIZE), 3) for q in range(4)},
        repetition=[2.0] * 4,
        device=sampler.device,
    )
    sampler.ops.control_logits(logits, batch)
    assert sampler.ops.sample(logits, sampling(4, device=sampler.device)).tolist() == [NO_TOKEN] * 4

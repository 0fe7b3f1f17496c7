"""Log-probabilities of sampled and of prompt tokens: what is to be scored, scored in slices, and read on the host.

Scoring a prompt takes the logits of each of its positions: 10 GB for a chunk of 16,384 over a vocabulary of 150,000. So
rows are taken as many at a time as fit SLICE_BYTES, whatever the prompt, the vocabulary and the number of logprobs.
Letters: kernels/ops.py and rows.py; G rows to score   K likeliest tokens of each, the most that any row asks for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import torch
from torch import Tensor

from aserve.core.plan import TokenScores
from aserve.kernels.ops import Ops, Scores
from aserve.models.interface import CausalLM

SLICE_BYTES: Final = 128 * 2**20
BYTES_PER_LOGIT: Final = 32
"""What scoring takes at its peak: the logits in the head's type and in float32, sort keys, and a sort's buffers."""


@dataclass(frozen=True, slots=True)
class SampledTargets:
    """Which of a step's N sampled rows are scored. num_top_N: on the host, None for a row that is not."""

    num_top_N: tuple[int | None, ...]
    rows_G: Tensor


@dataclass(frozen=True, slots=True)
class PromptTargets:
    """Which of a step's T tokens predict a token of a prompt, and which one.

    num_top, target_ids: on the host, for each slice with targets, in the plan's order.
    """

    num_top: tuple[int, ...]
    target_ids: tuple[tuple[int, ...], ...]
    tokens_G: Tensor
    targets_G: Tensor


def score_sampled(ops: Ops, logits_NV: Tensor, ids_N: Tensor, wanted: SampledTargets) -> Scores:
    """Scores of the sampled tokens of G rows."""
    num_top = max(k for k in wanted.num_top_N if k is not None)

    def score(start: int, end: int) -> Scores:
        rows = wanted.rows_G[start:end]
        return ops.score(logits_NV.index_select(0, rows), ids_N.index_select(0, rows), num_top)

    return _in_slices(score, len(wanted.rows_G), logits_NV.shape[1])


def score_prompt(model: CausalLM, ops: Ops, hidden_TE: Tensor, wanted: PromptTargets) -> Scores:
    """Scores of G prompt tokens."""
    num_top = max(wanted.num_top)

    def score(start: int, end: int) -> Scores:
        logits = model.logits(hidden_TE.index_select(0, wanted.tokens_G[start:end])).float()
        return ops.score(logits, wanted.targets_G[start:end], num_top)

    return _in_slices(score, len(wanted.tokens_G), model.spec.vocab_size)


def _in_slices(score: Callable[[int, int], Scores], num_rows: int, vocab_size: int) -> Scores:
    step = max(1, SLICE_BYTES // (BYTES_PER_LOGIT * vocab_size))
    parts = [score(start, start + step) for start in range(0, num_rows, step)]
    if len(parts) == 1:
        return parts[0]
    return Scores(
        logprobs_S=torch.cat([part.logprobs_S for part in parts]),
        ranks_S=torch.cat([part.ranks_S for part in parts]),
        top_ids_SK=torch.cat([part.top_ids_SK for part in parts]),
        top_logprobs_SK=torch.cat([part.top_logprobs_SK for part in parts]),
    )


class HostScores(NamedTuple):
    """The fields of Scores, on the host."""

    logprobs: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


def tensors_of(scores: Scores) -> tuple[Tensor, ...]:
    """What has to be downloaded to make HostScores of it."""
    return scores.logprobs_S, scores.ranks_S, scores.top_ids_SK, scores.top_logprobs_SK


def sampled_scores(
    wanted: SampledTargets, token_ids: Sequence[int], scores: HostScores
) -> tuple[TokenScores | None, ...]:
    """For each sampled row, as in StepResult."""
    scored = [(token_id, k) for token_id, k in zip(token_ids, wanted.num_top_N, strict=True) if k is not None]
    found = _token_scores(scored, scores)
    return tuple(None if k is None else next(found) for k in wanted.num_top_N)


def prompt_scores(wanted: PromptTargets, scores: HostScores) -> tuple[tuple[TokenScores, ...], ...]:
    """For each slice with targets, as in StepResult."""
    scored = [(token_id, k) for ids, k in zip(wanted.target_ids, wanted.num_top, strict=True) for token_id in ids]
    found = _token_scores(scored, scores)
    return tuple(tuple(islice(found, len(ids))) for ids in wanted.target_ids)


def _token_scores(scored: Sequence[tuple[int, int]], scores: HostScores) -> Iterator[TokenScores]:
    """scored: token ids, and how many of the likeliest each has asked for."""
    for (token_id, k), logprob, rank, top_ids, top_logprobs in zip(scored, *scores, strict=True):
        yield TokenScores(token_id, logprob, rank, tuple(top_ids[:k]), tuple(top_logprobs[:k]))

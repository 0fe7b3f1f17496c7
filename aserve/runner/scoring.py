"""Log-probabilities of sampled and of prompt tokens: what is to be scored, scored in slices, and read on the host.

Scoring a prompt takes the logits of each of its positions: 10 GB for a chunk of 16,384 over a vocabulary of 150,000. So
rows are taken as many at a time as fit SLICE_BYTES, whatever the prompt, the vocabulary and the number of logprobs.
Letters: kernels/ops.py and rows.py; G rows to score   K tokens beside that of each, the most that any row asks for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    """Some of a step's N sampled rows, which are scored together: those that ask for few of the likeliest tokens, for
    many, or for tokens that they name.

    places, num_top: on the host, which of the N they are, and how many tokens each has asked for. named_GK: those
    tokens, padded with 0; K is 0 where they are the likeliest.
    """

    places: tuple[int, ...]
    num_top: tuple[int, ...]
    rows_G: Tensor
    named_GK: Tensor


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
    names_tokens = wanted.named_GK.shape[1] > 0
    num_top = 0 if names_tokens else max(wanted.num_top)

    def score(start: int, end: int) -> Scores:
        rows, named = wanted.rows_G[start:end], wanted.named_GK[start:end]
        logits = logits_NV.index_select(0, rows)
        scores = ops.score(logits, ids_N.index_select(0, rows), num_top)
        if not names_tokens:
            return scores
        logprobs = logits.gather(1, named) - scores.normalizers_S[:, None]
        return replace(scores, top_ids_SK=named, top_logprobs_SK=logprobs)

    return _in_slices(score, len(wanted.rows_G), logits_NV.shape[1])


def score_prompt(model: CausalLM, ops: Ops, hidden_TE: Tensor, wanted: PromptTargets) -> Scores:
    """Scores of G prompt tokens."""
    num_top = max(wanted.num_top)

    def score(start: int, end: int) -> Scores:
        logits = model.logits(hidden_TE.index_select(0, wanted.tokens_G[start:end])).float()
        return ops.score(logits, wanted.targets_G[start:end], num_top)

    return _in_slices(score, len(wanted.tokens_G), model.spec.vocab_size)


def join_score_prompt(model: CausalLM, hidden_TE: Tensor, wanted: PromptTargets) -> None:
    """A rank's part of the logits, where another one scores: as often, and of as many rows, as `score_prompt`."""
    step = _rows_at_once(model.spec.vocab_size)
    for start in range(0, len(wanted.tokens_G), step):
        model.logits(hidden_TE.index_select(0, wanted.tokens_G[start : start + step]))


def _rows_at_once(vocab_size: int) -> int:
    return max(1, SLICE_BYTES // (BYTES_PER_LOGIT * vocab_size))


def _in_slices(score: Callable[[int, int], Scores], num_rows: int, vocab_size: int) -> Scores:
    step = _rows_at_once(vocab_size)
    parts = [score(start, start + step) for start in range(0, num_rows, step)]
    if len(parts) == 1:
        return parts[0]
    return Scores(
        logprobs_S=torch.cat([part.logprobs_S for part in parts]),
        ranks_S=torch.cat([part.ranks_S for part in parts]),
        top_ids_SK=torch.cat([part.top_ids_SK for part in parts]),
        top_logprobs_SK=torch.cat([part.top_logprobs_SK for part in parts]),
        normalizers_S=torch.cat([part.normalizers_S for part in parts]),
    )


class HostScores(NamedTuple):
    """The fields of Scores that are told, on the host."""

    logprobs: list[float]
    ranks: list[int]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


def tensors_of(scores: Scores) -> tuple[Tensor, ...]:
    """What has to be downloaded to make HostScores of it."""
    return scores.logprobs_S, scores.ranks_S, scores.top_ids_SK, scores.top_logprobs_SK


def sampled_scores(
    wanted: Sequence[SampledTargets], token_ids: Sequence[int], scores: Sequence[HostScores]
) -> tuple[TokenScores | None, ...]:
    """For each sampled row, as in StepResult; () where none is scored."""
    found: list[TokenScores | None] = [None] * len(token_ids)
    for part, its_scores in zip(wanted, scores, strict=True):
        scored = [(token_ids[place], k) for place, k in zip(part.places, part.num_top, strict=True)]
        for place, score in zip(part.places, _token_scores(scored, its_scores), strict=True):
            found[place] = score
    return tuple(found) if wanted else ()


def prompt_scores(wanted: PromptTargets, scores: HostScores) -> tuple[tuple[TokenScores, ...], ...]:
    """For each slice with targets, as in StepResult."""
    scored = [(token_id, k) for ids, k in zip(wanted.target_ids, wanted.num_top, strict=True) for token_id in ids]
    found = _token_scores(scored, scores)
    return tuple(tuple(islice(found, len(ids))) for ids in wanted.target_ids)


def _token_scores(scored: Sequence[tuple[int, int]], scores: HostScores) -> Iterator[TokenScores]:
    """scored: token ids, and how many tokens beside it each has asked for."""
    for (token_id, k), logprob, rank, top_ids, top_logprobs in zip(scored, *scores, strict=True):
        yield TokenScores(token_id, logprob, rank, tuple(top_ids[:k]), tuple(top_logprobs[:k]))

"""Unpadded: an encoder's sequences one behind the other in a single row, so that nothing is computed of padding.

    token ids                     [1, T]    all of the first sequence, all of the second, ...
    linear layers, norms          [1, T, E] as of one long sequence
    attention                     each sequence by itself, those of one length at once

transformers' models hand forward's keyword arguments on to their attention, which aserve replaces by its interface
(models/transformers_backend.py does so for decoders). The idea is that of FlashAttention's `varlen` functions.
Letters: T tokens of all sequences, E hidden size, H heads, D their size, L tokens of a sequence. Importing this module
imports transformers.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

ATTENTION: Final = "aserve_unpadded"


class Run(NamedTuple):
    """So many sequences behind each other, each of as many tokens."""

    num: int
    length: int


class NotHandedOnError(Exception):
    """A model's attention was not told which tokens belong together."""


def register() -> None:
    """Let transformers know of `attend_unpadded`, by the name ATTENTION, and that it needs no mask."""
    AttentionInterface.register(ATTENTION, attend_unpadded)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


def runs_of(lens: Sequence[int]) -> tuple[Run, ...]:
    """Of sequences in their order."""
    return tuple(Run(len(list(alike)), length) for length, alike in groupby(lens))


def attend_unpadded(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    aserve_runs: Sequence[Run] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q, k, v [1, H, T, D] to ([1, T, H, D], no attention weights).

    sliding_window: a position sees those that are less far away, on both sides. Raises `NotHandedOnError` without runs.
    """
    if aserve_runs is None:
        raise NotHandedOnError
    out_THD = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    begin = 0
    for num, length in aserve_runs:
        end = begin + num * length
        q, k, v = (
            x[0, :, begin:end].view(x.shape[1], num, length, x.shape[3]).transpose(0, 1) for x in (query, key, value)
        )
        mask = None if sliding_window is None or length <= sliding_window else _band(length, sliding_window, q.device)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        out_THD[begin:end].view(num, length, *out_THD.shape[1:]).copy_(seen.transpose(1, 2))
        begin = end
    return out_THD[None], None


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """[L, L]: which positions see each other."""
    places_L = torch.arange(length, device=device)
    return (places_L[:, None] - places_L).abs() < window

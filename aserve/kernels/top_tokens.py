"""The likeliest tokens of a row, by torch: what every implementation of `Ops.score` shares but the reference."""

import torch
from torch import Tensor

from aserve.kernels.ops import Scores


def with_top_tokens(
    logits_SV: Tensor, targets_S: Tensor, normalizer_S: Tensor, ranks_S: Tensor, num_top: int
) -> Scores:
    """Scores from each row's log(sum(exp(logits))) and rank."""
    normalizer_S1 = normalizer_S[:, None]
    ids_SK = top_ids(logits_SV, min(num_top, logits_SV.shape[1]))
    return Scores(
        logprobs_S=(logits_SV.gather(1, targets_S[:, None]) - normalizer_S1).squeeze(1),
        ranks_S=ranks_S,
        top_ids_SK=ids_SK,
        top_logprobs_SK=logits_SV.gather(1, ids_SK) - normalizer_S1,
        normalizers_S=normalizer_S,
    )


def top_ids(logits_SV: Tensor, num_top: int) -> Tensor:
    """The ids of the largest logits, best first and the lowest of equals first, int64 [S, num_top].

    torch.topk returns any of equal values, and in half precision logits are often equal. So it is given integers that
    are ordered like (logit, lower id first): the bits of a float32 order like an integer but for the sign.
    """
    vocab_size = logits_SV.shape[1]
    if num_top == 0:
        return torch.empty((len(logits_SV), 0), dtype=torch.int64, device=logits_SV.device)
    bits_SV = (logits_SV + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered_SV = torch.where(bits_SV < 0, bits_SV ^ 0x7FFFFFFF, bits_SV).long()
    from_the_end_V = torch.arange(vocab_size - 1, -1, -1, device=logits_SV.device)
    keys_SK = torch.topk(ordered_SV * 2**32 + from_the_end_V, num_top, dim=1).values
    return vocab_size - 1 - (keys_SK & 0xFFFFFFFF)

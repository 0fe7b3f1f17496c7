"""What adapters add to a linear layer, on a CPU by torch: in tiles of as many rows each.

A product of another number of rows may add up in another order, so that a row's bits would depend on how many others
have its adapter. So a tile is filled up with rows of zeros, and all products have one shape.
"""

from itertools import pairwise
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from aserve.kernels.ops import LoraBatch, LoraWeights
from aserve.kernels.packed_linear import MAX_PLAIN_RUN, plain_linear

_TILE_ROWS: Final = 16


def add_lora(out_TO: Tensor, x_TI: Tensor, weights: LoraWeights, batch: LoraBatch) -> None:
    """Write out += x A B into the rows that `batch` names; see `Ops.add_lora`."""
    for adapter, (start, end) in enumerate(pairwise(batch.starts_G1.tolist())):
        if start == end:
            continue
        a_PIR, b_RO = weights.a_GPIR[adapter].float(), weights.b_GRO[adapter].float()
        for tokens in batch.tokens_N[start:end].split(_TILE_ROWS):
            num_padding = _TILE_ROWS - len(tokens)
            tile_NI = F.pad(x_TI.index_select(0, tokens).float(), (0, 0, 0, num_padding))
            shrunk = (plain_linear(tile_NI, a_IR.split(MAX_PLAIN_RUN), None) for a_IR in a_PIR)
            added = [s_NR @ b_Ro for s_NR, b_Ro in zip(shrunk, b_RO.split(weights.sizes, 1), strict=True)]
            added_NO = torch.cat(added, 1)[: len(tokens)]
            out_TO[tokens] = (out_TO.index_select(0, tokens) + added_NO).to(out_TO.dtype)

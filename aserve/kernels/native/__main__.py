"""`python -m aserve.kernels.native`: compile the CPU kernels now, so that the first start need not, or say why not."""

import torch

from aserve.kernels.dispatch import describe, select_ops

print(*describe(select_ops(torch.device("cpu"))), sep="\n")

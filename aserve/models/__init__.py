"""Model families, each written as its formula over the operations of aserve.kernels, and how checkpoints load."""

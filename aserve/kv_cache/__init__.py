"""The KV cache as integers and hashes: which block holds which positions of whom. The memory itself is the runner's."""

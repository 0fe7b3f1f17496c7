"""Names for the integers, strings and bytes that identify things, so that a type checker tells them apart."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One call of a user; unique among the live requests of an engine."""
ChoiceId = tuple[RequestId, int]
"""One answer of a call: the request, and which of its choices."""
SeqId = NewType("SeqId", int)
"""One sequence of tokens in the scheduler; never reused in an engine's life."""
Row = NewType("Row", int)
"""A sequence's place in the runner's device tables, in [0, max_num_seqs); reused."""
BlockId = NewType("BlockId", int)
"""A block of the KV cache, in [1, num_blocks); block 0 is the null block and never allocated (I5)."""
HostBlockId = NewType("HostBlockId", int)
"""A block of the swap space in host memory, in [0, num_host_blocks)."""
BlockHash = NewType("BlockHash", bytes)
"""32 bytes of sha256 over (parent hash, tokens and extra keys of one full block); the salt enters the root."""
AdapterId = NewType("AdapterId", int)
"""Low-rank changes to a model's weights (LoRA), as they were loaded; never reused: loaded again they are another's."""
ExtraKey = tuple[int, bytes]
"""What the model reads at a position and behind it besides tokens: the position, and a name that nothing else bears."""

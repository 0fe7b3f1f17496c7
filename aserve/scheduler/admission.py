"""Who may start: what fits at all, and what fits now.

A sequence is admitted with blocks for all of its tokens or not at all, so that a long prompt is never preempted
half way through its chunks by its own growth. The watermark keeps some blocks free for those that run; it is waived
when nobody runs, or a large prompt would wait for ever (I13).
"""

from aserve.core.errors import ContextLengthError, InvalidRequestError
from aserve.core.ids import BlockId
from aserve.kv_cache.paged_cache import PagedCache
from aserve.scheduler.sequence import Sequence


class Admission:
    """The limits of one engine. `watermark` is a share of the blocks; lengths are in tokens."""

    def __init__(self, cache: PagedCache, *, max_model_len: int, watermark: float) -> None:
        self._cache = cache
        self._max_model_len = max_model_len
        self._num_kv_tokens = cache.num_blocks * cache.block_size
        self._num_spare_blocks = int(watermark * cache.num_blocks)
        self.context_len = min(max_model_len, self._num_kv_tokens)
        """Tokens that a sequence can have, prompt and answer together."""

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raise `ContextLengthError` if a prompt could never be computed and answered with at least one token (I17)."""
        if num_prompt_tokens < 1:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if num_prompt_tokens < self.context_len:
            return
        if self._max_model_len <= self._num_kv_tokens:
            limit = f"the maximum context length is {self._max_model_len} tokens"
        else:
            limit = f"the KV cache holds {self._num_kv_tokens} tokens"
        raise ContextLengthError(f"{limit}, but the prompt has {num_prompt_tokens} and one must be left to generate")

    def admit(self, sequence: Sequence, *, others_run: bool) -> tuple[BlockId, ...] | None:
        """Take blocks for all tokens of a waiting sequence. Returns those of its cached prefix; None: it must wait."""
        num_spare_blocks = self._num_spare_blocks if others_run else 0
        hits = self._cache.acquire(sequence.table, sequence.token_ids, num_spare_blocks=num_spare_blocks)
        if hits is None:
            return None
        num_matched = len(hits) * self._cache.block_size
        assert num_matched < len(sequence.token_ids), f"I9: nothing is left to compute of {sequence!r}"
        sequence.num_prefill = len(sequence.token_ids)
        sequence.num_computed = num_matched
        if sequence.num_preemptions == 0:
            sequence.num_cached = num_matched
        return hits

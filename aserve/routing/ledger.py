"""Ledger: at a replica, which cached block stands for which beginning of a prompt. Bounded; asks nobody until asked.

    a request ended      its keys (of text)    k0   k1   k2   k3          ends at 1/4, 1/2, 3/4 and 1 of its bytes
                         its blocks (of tokens) b0  b1  b2  b3  b4  b5     each is noted with the block of an equal
                                                                          share of the tokens: k1 -> b2
    asked for a digest   those keys whose block is still in the prefix cache, and so are those of shorter beginnings

So nothing has to be told of an eviction. What it is wrong by: a text's tokens are not spread evenly over its bytes,
which shifts the block by some; the answer's own blocks are not noted, nor is who is still answered.

Keys are used least recently at the end of a prompt, as the engine's own blocks are: what is forgotten first here goes
first there, and of two keys the shorter beginning is always the newer.
"""

from collections.abc import Callable, Sequence
from typing import Final

from aserve.core.ids import BlockHash
from aserve.core.request import Request
from aserve.kv_cache.hashing import prompt_hashes
from aserve.routing.digest import MAX_HASHES, encode
from aserve.routing.keys import PromptKeys

MAX_PENDING: Final = 4096
_BYTES_DECAY: Final = 0.97
"""Of bytes and tokens seen, a prompt: about the last 30 count."""


def hashes_of(request: Request, block_size: int) -> Sequence[BlockHash]:
    """Those of a prompt's full blocks: computed already of a long one, and now of a short one."""
    if request.prompt_hashes:
        return request.prompt_hashes
    given = request.cache_salt, request.prompt_token_ids, block_size, request.extra_keys
    return [block_hash for some in prompt_hashes(*given) for block_hash in some]


class Ledger:
    """Of one replica. max_keys: beginnings that are remembered, the newest: some 200 bytes each."""

    def __init__(self, max_keys: int = MAX_HASHES) -> None:
        self._max_keys = min(max_keys, MAX_HASHES)
        self._blocks: dict[int, tuple[int | None, BlockHash]] = {}
        """By key, the newest last: the key before it, and a block."""
        self._pending: dict[str, PromptKeys] = {}
        self._bytes = self._tokens = 0.0

    def __len__(self) -> int:
        return len(self._blocks)

    def came(self, name: str, keys: PromptKeys) -> None:
        """A request of this name came with these keys. Forgotten if too many others come before it ends."""
        self._pending.pop(name, None)
        self._pending[name] = keys
        if len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]

    def awaits(self, name: str) -> bool:
        """Whether a request of this name has come, and has not ended."""
        return name in self._pending

    def ended(self, name: str, num_tokens: int, block_size: int, block_hashes: Sequence[BlockHash]) -> None:
        """It is over: its prompt had so many tokens, and its first blocks these hashes. Unknown names are ignored."""
        keys = self._pending.pop(name, None)
        if keys is None or not keys.num_bytes or not num_tokens:
            return
        if keys.bytes_per_token is None:
            self._bytes = self._bytes * _BYTES_DECAY + keys.num_bytes
            self._tokens = self._tokens * _BYTES_DECAY + num_tokens
        per_block = block_size * keys.num_bytes / num_tokens
        noted: list[tuple[int, tuple[int | None, BlockHash]]] = []
        before: int | None = None
        for place, key in enumerate(keys.hashes, start=1):
            num_blocks = int(keys.end(place) / per_block)
            if num_blocks > len(block_hashes):
                break
            if num_blocks:
                noted.append((key, (before, block_hashes[num_blocks - 1])))
                before = key
        for key, entry in reversed(noted):
            self._blocks.pop(key, None)
            self._blocks[key] = entry
        while len(self._blocks) > self._max_keys:
            del self._blocks[next(iter(self._blocks))]

    @property
    def bytes_per_token(self) -> float | None:
        """Measured on the latest prompts; None before there was one."""
        return self._bytes / self._tokens if self._tokens else None

    def digest(self, is_cached: Callable[[BlockHash], bool]) -> bytes:
        """Of those that the prefix cache still has. Forgets the others. Cost: all that is remembered, 0.7 us each."""
        held: set[int] = set()
        gone: list[int] = []
        for key in reversed(self._blocks):
            before, block_hash = self._blocks[key]
            if (before is None or before in held) and is_cached(block_hash):
                held.add(key)
            else:
                gone.append(key)
        for key in gone:
            del self._blocks[key]
        return encode(held)

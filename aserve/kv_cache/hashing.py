"""Names for full blocks: a chain of sha256, in which a block's hash covers every token before it too.

    root = sha256(salt)    h[0] = sha256(root + tokens of block 0)    h[i] = sha256(h[i - 1] + tokens of block i)

Where keys and values depend on more than tokens, a name of that, an extra key, is added to the block with the position
from which on it matters, and so enters all blocks behind it: an adapter's at position 0, an image's where it begins.

Equal hashes mean equal salt, tokens, extra keys and positions (I8), so a hit never compares tokens. A cryptographic
hash, since whoever could make two prompts collide would read another's answers. The bytes of a token depend on the
machine's byte order: a hash is never stored or sent.

Knows nothing of blocks, pools or sequences.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Final

from aserve.core.ids import BlockHash, ExtraKey

_BLOCKS_AT_ONCE: Final = 128


def root_hash(salt: bytes) -> BlockHash:
    """The parent of a sequence's first block. Sequences share blocks only if their roots are equal."""
    return BlockHash(sha256(salt).digest())


def extend_chain(
    chain: list[BlockHash],
    token_ids: Sequence[int],
    num_blocks: int,
    block_size: int,
    extra_keys: Sequence[ExtraKey] = (),
) -> None:
    """Append hashes to `chain` (root first) until it names the first `num_blocks` full blocks of `token_ids`.

    Costs nothing when it does already, and never looks at the tokens of blocks that it names.
    """
    first = len(chain) - 1
    if first >= num_blocks:
        return
    new_tokens = memoryview(array("I", token_ids[first * block_size : num_blocks * block_size]))
    parent = chain[-1]
    for start in range(0, len(new_tokens), block_size):
        digest = sha256(parent)
        digest.update(new_tokens[start : start + block_size])
        if extra_keys:
            position = first * block_size + start
            digest.update(_keys_in(extra_keys, position, position + block_size))
        parent = BlockHash(digest.digest())
        chain.append(parent)


def prompt_hashes(
    salt: bytes, token_ids: Sequence[int], block_size: int, extra_keys: Sequence[ExtraKey] = ()
) -> Iterator[list[BlockHash]]:
    """Of the full blocks that a prompt may find cached: all but the one with its last token (I9). Without the root.

    Some at a time: all those of a long prompt take longer than an event loop may be kept waiting.
    """
    chain = [root_hash(salt)]
    num_blocks = (len(token_ids) - 1) // block_size
    for first in range(0, num_blocks, _BLOCKS_AT_ONCE):
        extend_chain(chain, token_ids, min(first + _BLOCKS_AT_ONCE, num_blocks), block_size, extra_keys)
        yield chain[first + 1 :]


def _keys_in(extra_keys: Sequence[ExtraKey], first: int, last: int) -> bytes:
    """Those at positions in [first, last) as bytes that no others make: each with its position and its length."""
    inside = sorted((position, key) for position, key in extra_keys if first <= position < last)
    return b"".join(b"%d %d " % (position, len(key)) + key for position, key in inside)

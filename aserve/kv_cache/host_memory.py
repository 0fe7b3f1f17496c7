"""HostMemory: what of the KV cache is in host memory, and what has to cross for it before the next step.

It serves two: tables of preempted sequences, which `put` takes out whole and `fetch` brings back; and the *host tier*,
where cached blocks live on when the device gives them to somebody else, until they are asked for again or host memory
runs short. Tables come first.

    device   cached block --evicted--> another's     new block, not yet cached
                   |                                     ^
    host           '----> kept, least recently used  ----'        both copies are made before the next step writes

Moves are gathered here until a plan takes them, and dropped when nobody wants them any more. Until then a host block
that will be read is held, as a plan's moves to the host are made before those from it. Knows no tokens.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from aserve.core.config import EngineConfig
from aserve.core.ids import BlockHash, BlockId, HostBlockId
from aserve.kv_cache.block_pool import NULL_BLOCK, BlockPool
from aserve.kv_cache.swap import HostPool
from aserve.kv_cache.table import BlockTable

SwapOut = tuple[BlockId, HostBlockId]
SwapIn = tuple[HostBlockId, BlockId]


class OnHost(NamedTuple):
    """A cached block that is not on the device."""

    host_id: HostBlockId


def copying_pays(*, recompute_cost_s: float, swap_cost_s: float, block_size: int, num_groups: int = 1) -> bool:
    """Whether a span that went to the host and came back cost less than to compute its positions again.

    recompute_cost_s: of a position. swap_cost_s: of a block, one way.
    """
    return 2 * num_groups * swap_cost_s < block_size * recompute_cost_s


class HostMemory:
    """`num_blocks` host blocks beside a device's pool. keeps_evicted: whether there is a tier."""

    def __init__(self, pool: BlockPool, num_blocks: int, *, keeps_evicted: bool) -> None:
        self.num_returned = 0
        """Blocks that came back from the tier."""
        self._pool = pool
        self._num_blocks = num_blocks
        self.restart()
        if keeps_evicted and num_blocks:
            pool.on_evict = self._keep

    def restart(self) -> None:
        """Nothing is there, and nothing has to cross."""
        self._host = HostPool(self._num_blocks)
        self._outs: dict[HostBlockId, BlockId] = {}
        self._ins: list[SwapIn] = []
        self._read: list[HostBlockId] = []

    @property
    def num_held(self) -> int:
        """Blocks that sequences hold."""
        return self._host.num_held

    @property
    def num_kept(self) -> int:
        """Blocks of the tier."""
        return self._host.num_kept

    @property
    def kept_ids(self) -> Iterable[HostBlockId]:
        """The blocks of the tier."""
        return self._host.kept_ids()

    # Tables.

    def put(self, tables: Sequence[BlockTable]) -> tuple[SwapOut, ...] | None:
        """Move tables out, a block that several share once. None, nothing changed, if it is too full."""
        held = {block_id for table in tables for block_id in table.block_ids if block_id != NULL_BLOCK}
        if len(held) > self._host.num_free:
            return None
        places: dict[BlockId, HostBlockId] = {}
        for table in tables:
            for block_id in table.block_ids:
                if block_id == NULL_BLOCK:
                    table.host_ids.append(None)
                    continue
                if block_id in places:
                    self._host.pin(places[block_id])
                else:
                    places[block_id] = self._host.allocate()
                    self._outs[places[block_id]] = block_id  # instead of what was to be kept there, if anything was
                table.host_ids.append(places[block_id])
        return tuple(places.items())

    def fetch(
        self, tables: Sequence[BlockTable], on_device: dict[HostBlockId, BlockId], num_spare_blocks: int
    ) -> tuple[SwapIn, ...] | None:
        """Give tables their blocks back: those `on_device`, and new ones. Returns the moves to the new ones.

        None, with nothing changed, if fewer than `num_spare_blocks` would be left free.
        """
        hits = tuple(on_device.values())
        wanted = dict.fromkeys(host_id for table in tables for host_id in _blocks(table))
        missing = [host_id for host_id in wanted if host_id not in on_device]
        if len(missing) + num_spare_blocks > self._pool.num_free - self._pool.num_idle(set(hits)):
            return None
        self._pool.pin(hits)
        moved = tuple(zip(missing, self._move_in(missing), strict=True))
        places = on_device | dict(moved)
        unshared = set(places)
        for table in tables:
            host_ids = _blocks(table)
            table.block_ids.extend(NULL_BLOCK if host_id is None else places[host_id] for host_id in table.host_ids)
            self._pool.pin(places[host_id] for host_id in host_ids if host_id not in unshared)
            unshared.difference_update(host_ids)
            self.leave(table)
        return moved

    def leave(self, table: BlockTable) -> None:
        """Give a table's place up."""
        for host_id in _blocks(table):
            self._host.release((host_id,))
            if not self._host.is_held(host_id):
                self._outs.pop(host_id, None)
        table.host_ids.clear()

    # The tier.

    def find(self, block_hash: BlockHash) -> OnHost | None:
        """A block of the tier. It stays there only until blocks are allocated, here or on the device."""
        host_id = self._host.lookup(block_hash)
        return None if host_id is None else OnHost(host_id)

    def bring_back(self, places: Sequence[OnHost]) -> tuple[BlockId, ...]:
        """New blocks on the device, with a reference each, for what is in the tier. It stays there as well."""
        host_ids = [place.host_id for place in places]
        for host_id in host_ids:
            self._host.touch(host_id)
        self.num_returned += len(host_ids)
        return self._move_in(host_ids)

    def distrust(self, host_ids: Iterable[HostBlockId]) -> None:
        """What was to be copied there may not have come."""
        self._host.forget(host_ids)

    def forget_one(self, block_hash: BlockHash) -> None:
        """A block of the tier is found no more."""
        host_id = self._host.lookup(block_hash)
        if host_id is not None:
            self._host.forget((host_id,))
            if not self._host.is_held(host_id):
                self._outs.pop(host_id, None)

    def forget_kept(self) -> None:
        """Nothing of the tier is found any more."""
        for host_id in self._host.forget_all():
            self._outs.pop(host_id, None)

    # Moves.

    def drop_moves_to_free_blocks(self) -> None:
        """Nobody waits for them, and the blocks may have other moves to come."""
        self._ins = [move for move in self._ins if self._pool.refs(move[1])]

    @property
    def has_moves(self) -> bool:
        """Whether `take_moves` has something to give, or to let go."""
        return bool(self._outs or self._ins or self._read)

    def take_moves(self) -> tuple[tuple[SwapOut, ...], tuple[SwapIn, ...]]:
        """What has to be copied out, and in, before the next step; a plan takes it along."""
        if not (self._outs or self._read):  # as in most steps
            return (), ()
        outs = tuple((block_id, host_id) for host_id, block_id in self._outs.items())
        ins = tuple(self._ins)
        self._outs.clear()
        self._ins.clear()
        self._host.release(self._read)
        self._read.clear()
        return outs, ins

    def check(self, swapped: Iterable[BlockTable]) -> None:
        """Assert I1 to I3 and I8 on the host, where `swapped` are the tables that are there."""
        self._host.check((*map(_blocks, swapped), self._read))

    def _keep(self, block_id: BlockId, block_hash: BlockHash) -> None:
        """The device gives a cached block away: its content goes to the host, if there is a place for it."""
        host_id = self._host.keep(block_hash)
        if host_id is not None:
            self._outs[host_id] = block_id

    def _move_in(self, host_ids: Sequence[HostBlockId]) -> tuple[BlockId, ...]:
        """To new blocks. First of all their places are held, for what the device evicts now may look for one."""
        for host_id in host_ids:
            self._host.pin(host_id)
        self._read.extend(host_ids)
        block_ids = self._pool.allocate(len(host_ids))
        self._ins.extend(zip(host_ids, block_ids, strict=True))
        return block_ids


def _blocks(table: BlockTable) -> list[HostBlockId]:
    """Those of a table on the host, without the null block."""
    return [host_id for host_id in table.host_ids if host_id is not None]


def has_host_tier(config: EngineConfig) -> bool:
    """Whether prefix blocks live on in the swap space when others get theirs: where copying beats computing again."""
    return config.num_host_blocks > 0 and copying_pays(
        recompute_cost_s=config.recompute_cost_s,
        swap_cost_s=config.swap_cost_s,
        block_size=config.block_size,
        num_groups=len(config.kv_windows),
    )

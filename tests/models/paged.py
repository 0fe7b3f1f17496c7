"""A paged cache by hand: drives a `CausalLM` one sequence at a time, on blocks in a scrambled order."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aserve.kernels.ops import AttentionBatch, KVLayer, LoraBatch
from aserve.kernels.reference_fp8 import as_kept
from aserve.models.interface import CausalLM, ForwardBatch
from aserve.models.spec import ModelSpec
from aserve.runner.adapters import by_slot

BLOCK_SIZE = 8


class PagedSequences:
    """Several sequences' blocks in one cache of `num_blocks`; their tokens run in any mixture of slices."""

    def __init__(
        self,
        model: CausalLM,
        num_sequences: int = 1,
        max_len: int = 320,
        dtype: torch.dtype = torch.float32,
        slots: Sequence[int] | None = None,
        num_slots: int = 0,
    ) -> None:
        """dtype: of the cache. slots: of each sequence's adapter, -1 for none; None where nobody has one."""
        self._slots_S = None if slots is None else np.array(slots)
        self._num_slots = num_slots
        self._model = model
        blocks_each = -(-max_len // BLOCK_SIZE)
        num_blocks = 1 + num_sequences * blocks_each
        self.kv = make_cache(model.spec, num_blocks, dtype)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self._block_table_SM = order.view(num_sequences, blocks_each).to(torch.int32)
        self._lens = [0] * num_sequences

    def run(self, slices: Sequence[tuple[int, Sequence[int]]]) -> dict[int, Tensor]:
        """Compute one step of (sequence, its next tokens); returns each sequence's logits there, [tokens, V]."""
        hidden = self.hidden(slices)
        with torch.inference_mode():
            logits = self._model.logits(torch.cat(list(hidden.values())))
        assert logits.dtype == next(iter(hidden.values())).dtype
        parts = logits.float().split([len(part) for part in hidden.values()])
        return dict(zip(hidden, parts, strict=True))

    def hidden(self, slices: Sequence[tuple[int, Sequence[int]]]) -> dict[int, Tensor]:
        """As `run`, the hidden states, [tokens, E], those of single tokens first."""
        rows, sizes = zip(*((s, len(tokens)) for s, tokens in by_size(slices)), strict=True)
        return dict(zip(rows, self.forward(slices).split(sizes), strict=True))

    def forward(
        self,
        slices: Sequence[tuple[int, Sequence[int]]],
        wanted: Sequence[int] | None = None,
        *,
        wants_last: bool = False,
    ) -> Tensor:
        """Hidden states of a step's tokens, those of single tokens first. wanted: of which, as in `ForwardBatch`.
        wants_last: of each sequence's last token.
        """
        slices = by_size(slices)
        sizes = [len(tokens) for _, tokens in slices]
        positions = [
            torch.arange(self._lens[s], self._lens[s] + size) for (s, _), size in zip(slices, sizes, strict=True)
        ]
        for (s, _), size in zip(slices, sizes, strict=True):
            self._lens[s] += size
        rows = [s for s, _ in slices]
        starts_S1 = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        batch = AttentionBatch(
            num_decodes=sizes.count(1),
            slots_T=torch.cat([self._slots(s, p) for s, p in zip(rows, positions, strict=True)]),
            block_table_SM=self._block_table_SM[rows],
            seq_lens_S=torch.tensor([self._lens[s] for s in rows], dtype=torch.int32),
            query_starts_S1=starts_S1,
            max_query_len=max(sizes),
            max_seq_len=max(self._lens[s] for s in rows),
        )
        token_ids_T = torch.tensor([token for _, tokens in slices for token in tokens])
        if wants_last:
            wanted = (starts_S1[1:] - 1).tolist()
        with torch.inference_mode():
            wanted_N = None if wanted is None else torch.tensor(wanted, dtype=torch.int64)
            seen = ForwardBatch(torch.cat(positions), batch, self._lora(rows, sizes), wanted_N)
            return self._model.forward(token_ids_T, self.kv, seen)

    def _lora(self, rows: list[int], sizes: list[int]) -> LoraBatch | None:
        if self._slots_S is None:
            return None
        tokens_N, starts_G1 = by_slot(np.repeat(self._slots_S[rows], sizes), self._num_slots)
        return LoraBatch(torch.from_numpy(tokens_N[: starts_G1[-1]]), torch.from_numpy(starts_G1))

    def _slots(self, sequence: int, positions: Tensor) -> Tensor:
        blocks = self._block_table_SM[sequence][positions // BLOCK_SIZE].long()
        return blocks * BLOCK_SIZE + positions % BLOCK_SIZE


def by_size(slices: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, Sequence[int]]]:
    """Single tokens first."""
    return sorted(slices, key=lambda piece: len(piece[1]) > 1)


def make_cache(spec: ModelSpec, num_blocks: int, dtype: torch.dtype) -> list[KVLayer]:
    """One KVLayer a layer, full of noise, so that a read of what was not written shows."""
    shape = (num_blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    return [KVLayer(*(as_kept(torch.randn(shape), dtype) for _ in range(2))) for _ in range(spec.num_layers)]

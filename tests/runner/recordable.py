"""A model, operations and a graph device of torch's own functions: a step can be recorded, and repeated on a CPU.

`TapeGraphs` keeps what a capture on a GPU keeps: which functions ran, on which memory. Python does not run again at a
replay, and tensors stay where they are; what a step reads from anywhere else is what it was at capture.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from aserve.core.layout import KVLayout
from aserve.kernels.ops import AttentionBatch, KVLayer, Ops, SamplingBatch, TokenMasks
from aserve.kernels.reference import ReferenceOps
from aserve.models.interface import CausalLM, ForwardBatch
from aserve.models.lora import LoraLayers
from aserve.models.spec import ModelSpec
from aserve.runner.device import StepDevice
from aserve.runner.graph_device import GraphDevice
from aserve.runner.kv_store import allocate_kv
from aserve.runner.runner import ModelRunner

VOCAB_SIZE = 89
CONTEXT_LEN = 96
WINDOW = 7
LAYOUTS = MappingProxyType({"one group": None, "two groups": KVLayout(windows=(None, WINDOW), places=((0, 0), (1, 0)))})


class RecordableOps(ReferenceOps):
    """Masks and samples by torch alone; every input of SamplingBatch changes the tokens."""

    def mask_logits(self, logits_SV: Tensor, masks: TokenMasks) -> None:
        ids_V = torch.arange(logits_SV.shape[1])
        is_allowed_QV = masks.words_QW[:, ids_V >> 5] >> (ids_V & 31) & 1 == 1
        rows_QV = logits_SV.index_select(0, masks.rows_Q)
        logits_SV.index_copy_(0, masks.rows_Q, rows_QV.masked_fill(~is_allowed_QV, -torch.inf))

    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
        if batch.all_greedy:
            return logits_SV.argmax(-1)
        ids_V, columns_S = torch.arange(logits_SV.shape[1]), batch.columns_S
        noise_SV = torch.sin((columns_S.seed * 31 + batch.positions_S * 17)[:, None] * 0.37 + ids_V * 1.7)
        logits_SV = logits_SV + 4 * columns_S.temperature[:, None] * noise_SV
        if batch.any_filter:
            filters_S = columns_S.top_k * 5 + columns_S.top_p * 3 + columns_S.min_p * 11 - 3
            filters_S = filters_S * (columns_S.temperature > 0)
            logits_SV = logits_SV + torch.cos(ids_V * 0.9 + 1) * filters_S[:, None]
        return logits_SV.argmax(-1)


class RecordableLM:
    """Two layers whose caches hold tokens and positions; the hidden state is a hash of what a token sees in both.

    The second layer sees a window. Without a loop over sequences, and without a number read back.
    """

    spec = ModelSpec(
        architecture="RecordableLM",
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        intermediate_size=1,
        vocab_size=VOCAB_SIZE,
        context_len=CONTEXT_LEN,
        norm_eps=1e-5,
        windows=(None, WINDOW),
        rope=None,
        tie_embeddings=False,
    )

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        hash_T = torch.zeros_like(token_ids_T)
        for layer, cache in enumerate(kv):
            of_layer = batch.attention.of(cache)
            cache.k_BPKD.view(-1).index_copy_(0, of_layer.slots_T, token_ids_T.to(cache.k_BPKD.dtype))
            cache.v_BPKD.view(-1).index_copy_(0, of_layer.slots_T, batch.positions_T.to(cache.v_BPKD.dtype))
            hash_T = hash_T * 3 + self._hash(cache, of_layer, self.spec.windows[layer] or CONTEXT_LEN)
        return batch.wanted((hash_T % 10007).double()[:, None])

    def _hash(self, cache: KVLayer, batch: AttentionBatch, window: int) -> Tensor:
        block_size = cache.k_BPKD.shape[1]
        tokens_T = torch.arange(len(batch.slots_T), dtype=torch.int32)
        seq_T = torch.searchsorted(batch.query_starts_S1[1:].contiguous(), tokens_T, right=True)
        end_T = batch.seq_lens_S.index_select(0, seq_T) - batch.query_starts_S1.index_select(0, seq_T + 1) + tokens_T
        slots_TMP = batch.block_table_SM.index_select(0, seq_T).long()[:, :, None] * block_size + torch.arange(
            block_size
        )
        places = torch.arange(slots_TMP.shape[1] * block_size)
        visible = (places <= end_T[:, None]) & (places > end_T[:, None] - window)
        tokens, positions = (x.view(-1)[slots_TMP.flatten(1)].long() for x in (cache.k_BPKD, cache.v_BPKD))
        mixed = ((tokens + 1) * 7919 + positions * 104729 + tokens * positions * 31) % 10007
        return torch.where(visible, mixed, 0).sum(1)

    def logits(self, hidden_SE: Tensor) -> Tensor:
        return (3 * torch.cos(hidden_SE * torch.arange(1, VOCAB_SIZE + 1))).float()


class TapeGraphs:
    """A `GraphDevice` that records torch's functions. The recording run is real: it must be of padding only."""

    num_bytes = 0

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        with _Tape() as tape:
            work()

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self._calls:
            again = func(*args, **kwargs)
            for kept, new in zip(_tensors(out), _tensors(again), strict=True):
                if kept.data_ptr() != new.data_ptr():  # neither a view nor what was written in place
                    kept.copy_(new)


def _tensors(out: Any) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]


def recordable_runner(
    graph_device: GraphDevice | None,
    *,
    layout: KVLayout | None = None,
    num_blocks: int = 64,
    max_num_seqs: int = 12,
    device: StepDevice | None = None,
    model: CausalLM | None = None,
    ops: Ops | None = None,
    lora: LoraLayers | None = None,
) -> ModelRunner:
    kv = allocate_kv(
        RecordableLM.spec,
        num_blocks=num_blocks,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layout=layout,
    )
    return ModelRunner(
        model or RecordableLM(),
        ops or RecordableOps(),
        kv,
        max_num_seqs=max_num_seqs,
        max_model_len=CONTEXT_LEN,
        graph_device=graph_device,
        device=device,
        lora=lora,
    )

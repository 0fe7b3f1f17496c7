"""StepCalls: on a CPU, a model's steps by captured calls: prompts, decoding, drafts, of any number of tokens.

    the first step   --> capture: a made-up step of three tokens, on the null block
    every step       --> what it reads --> the memory of the inputs;   where it attends --> dealt anew
                         one call: embedding, layers, and the head and sampling too where parameters alone govern that

What a batch of tensors asks for (batch.py) is computed up to its hidden states, `forward`. Steps that are plain are
laid out from their plan and computed to the sampled ids: see plain_steps.py. Same kernels, same arguments as the eager
way, and so the same bits.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from aserve.core.columns import SAMPLING, SamplingColumns
from aserve.kernels.native.call_memory import UnrepeatableError
from aserve.kernels.native.captured_calls import CAPTURED, CapturedCalls, Sizes
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import AttentionBatch, KVLayer, Ops, SamplingBatch
from aserve.models.interface import CausalLM, ForwardBatch
from aserve.models.sharding import ALONE, Shard
from aserve.runner.device import Array

MAX_TOKENS: Final = 2048
"""With more, what the Python between kernels takes does not count."""
MAX_BYTES: Final = 64 * 1024 * 1024
"""Of what kernels hand on to each other in a step; those that need more go the eager way."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the calls of T tokens read that is a step's own, N of them wanted; with room for `MAX_TOKENS` of each.

    slots: of each group of layers. drawn_N: the positions that are sampled for, by the parameters of columns_N.
    moving_3T: positions_T, drawn_N and slots[0], all of which are one more at the next step of rows that decode.
    Of numpy: its operations on a few numbers keep Python's lock, which torch's give to the event loop each time.
    """

    token_ids_T: Array
    positions_T: Array
    slots: Sequence[Array]
    wanted_N: Array
    drawn_N: Array
    columns_N: SamplingColumns[Array]
    moving_3T: Array

    @classmethod
    def of(cls, num_groups: int) -> "StepInputs":
        """Of zeros, which are a token, and a place in the null block."""
        inputs = np.zeros((4 + num_groups, MAX_TOKENS), np.int64)
        token_ids_T, wanted_N, positions_T, drawn_N, *slots = inputs
        columns_N = SamplingColumns[Array](*(np.full(MAX_TOKENS, c.neutral, c.dtype) for c in SAMPLING))
        return cls(token_ids_T, positions_T, slots, wanted_N, drawn_N, columns_N, inputs[2:5])


class StepCalls:
    """Of one model and its cache. Only for one thread.

    beginning: is called once in each step, as late as can be before anything of it is computed that takes long.
    """

    def __init__(
        self,
        model: CausalLM,
        ops: NativeOps,
        kv: Sequence[KVLayer],
        beginning: Callable[[], object] = lambda: None,
    ) -> None:
        self._model, self._ops, self._kv, self._beginning = model, ops, kv, beginning
        self.num_groups = 1 + max((layer.group for layer in kv), default=0)
        self.inputs = StepInputs.of(self.num_groups)
        self._num_threads = torch.get_num_threads()
        self._calls: CapturedCalls | None = None
        self._is_captured = False

    def take(self, sizes: Sizes) -> bool:
        """Whether steps of these sizes can be made by the calls."""
        if not self._is_captured:
            self._is_captured = True
            self._calls = self._capture()
        return sizes.tokens <= MAX_TOKENS and self._calls is not None and self._calls.num_bytes(sizes) <= MAX_BYTES

    def repeat(self, sizes: Sizes, attention: AttentionBatch) -> Tensor:
        """Of a step that was taken, and whose inputs are there: as of `CapturedCalls`."""
        assert self._calls is not None, "steps were taken"
        return self._calls.repeat(sizes, attention, self._beginning)

    def forward(self, token_ids_T: Tensor, batch: ForwardBatch) -> Tensor | None:
        """Hidden states, [N, E], which lie where the next step's will; None for steps that go the eager way."""
        num_tokens, num_wanted = len(token_ids_T), len(token_ids_T if batch.wanted_N is None else batch.wanted_N)
        sizes = Sizes(num_tokens, num_wanted, 0)
        if batch.lora is not None or not self.take(sizes):
            self._beginning()
            return None
        inputs, groups = self.inputs, batch.attention.groups or (batch.attention,)
        inputs.token_ids_T[:num_tokens] = token_ids_T.numpy()
        inputs.positions_T[:num_tokens] = batch.positions_T.numpy()
        inputs.wanted_N[:num_wanted] = np.arange(num_tokens) if batch.wanted_N is None else batch.wanted_N.numpy()
        for slots_T, group in zip(inputs.slots, groups, strict=True):
            slots_T[:num_tokens] = group.slots_T.numpy()
        return self.repeat(sizes, batch.attention)

    def _capture(self) -> CapturedCalls | None:
        """Of a made-up step; None where the model does what is no kernel of ours."""
        inputs, (num_tokens, num_wanted, _) = self.inputs, CAPTURED
        slots = [torch.from_numpy(slots_T[:num_tokens]) for slots_T in inputs.slots]
        token_ids_T, positions_T = (torch.from_numpy(x[:num_tokens]) for x in (inputs.token_ids_T, inputs.positions_T))
        wanted_N, drawn_N = (torch.from_numpy(x[:num_wanted]) for x in (inputs.wanted_N, inputs.drawn_N))
        columns_N = SamplingColumns[Tensor](*(torch.from_numpy(column[:num_wanted]) for column in inputs.columns_N))
        sampling = SamplingBatch(columns_N, drawn_N, None, all_greedy=False, any_filter=True)
        groups = tuple(_on_null_block(num_tokens, slots_T) for slots_T in slots)
        seen = ForwardBatch(positions_T, replace(groups[0], groups=groups if len(groups) > 1 else ()), None, wanted_N)

        def forward() -> Tensor:
            return self._model.forward(token_ids_T, self._kv, seen)

        def sample(hidden_NE: Tensor) -> Tensor:
            spec = self._model.spec
            return self._ops.sample(self._model.logits(hidden_NE), sampling) if spec.has_head else hidden_NE

        self._ops.make_room(self._num_threads, self._model.spec.vocab_size)
        try:
            return CapturedCalls(self._ops, seen.attention, forward, sample)
        except UnrepeatableError as error:
            _log.debug("steps go kernel by kernel: %s", error)
            return None


def step_calls(
    model: CausalLM,
    ops: Ops,
    kv: Sequence[KVLayer],
    shard: Shard = ALONE,
    beginning: Callable[[], object] = lambda: None,
) -> StepCalls | None:
    """Those of a model that is computed by our own kernels; None for others, and where ranks add up between kernels."""
    return StepCalls(model, ops, kv, beginning) if type(ops) is NativeOps and shard.group is None else None


def _on_null_block(num_tokens: int, slots_T: Tensor) -> AttentionBatch:
    """One sequence, of nobody's."""
    return AttentionBatch(
        num_decodes=0,
        slots_T=slots_T,
        block_table_SM=torch.zeros(1, num_tokens, dtype=torch.int32),
        seq_lens_S=torch.tensor([num_tokens], dtype=torch.int32),
        query_starts_S1=torch.tensor([0, num_tokens], dtype=torch.int32),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )

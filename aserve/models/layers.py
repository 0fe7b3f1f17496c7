"""The layers that decoders share: linear layers behind a method, and the gated feed-forward block.

How a linear layer keeps its weight is a `LinearMethod`: dense, packed for oneDNN, packed for our own product, or
quantized (quantized.py). A `Projection` is one inside a block, to whose output adapters may add. Models say which
checkpoint tensors a layer is made of, and fuse where that saves a matrix product. Shape letters: kernels/ops.py, and
I, O for the inputs and outputs of a linear layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor, cat

from aserve.kernels.native.library import Library
from aserve.kernels.native.native_linear import NativeLinear
from aserve.kernels.native.weight_memory import WeightMemory
from aserve.kernels.ops import LinearOps, Ops
from aserve.kernels.packed_linear import (
    can_be_plain,
    can_pack,
    columns,
    pack,
    packed_linear,
    plain_is_fast,
    plain_linear,
)
from aserve.models.interface import ForwardBatch
from aserve.models.lora import LoraLayers
from aserve.models.sharding import Shard, Split
from aserve.models.spec import ModelSpec
from aserve.models.weights import Part, Weights

Embedding = Callable[[Tensor], Tensor]
"""Token ids [T] to the rows of a table, [T, E]."""


class Linear(Protocol):
    """x W^T + b."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        ...


@runtime_checkable
class GatingLinear(Protocol):
    """A linear layer that gates one half of its outputs by the other before it writes them."""

    def silu_and_mul(self) -> Callable[[Tensor], Tensor] | None:
        """What gives silu(a) * b, [T, O / 2], of [T, I], a and b being halves of the outputs; None where it cannot."""
        ...


@dataclass(frozen=True, slots=True)
class LinearShape:
    """One linear layer, possibly several of the checkpoint's side by side.

    outputs: name of each checkpoint layer and its number of outputs, in the order in which they are fused. split: how
    ranks share it, where there are several; outputs and num_inputs are then those of one.
    """

    outputs: Mapping[str, int]
    num_inputs: int
    bias: bool = False
    split: Split | None = None


class LinearMethod(Protocol):
    """How linear layers are loaded, kept and applied."""

    def load(self, weights: Weights, shape: LinearShape) -> Linear:
        """The layer, its weights taken from the checkpoint."""
        ...

    def tie(self, table_VE: Tensor) -> tuple[Embedding, Linear]:
        """An embedding and the output head that is tied to it, of one table, which the caller keeps no longer."""
        ...


class DenseLinear:
    """The weight as it is, multiplied by torch or by the products of the operations."""

    __slots__ = ("_bias_O", "_ops", "_product", "_weight_OI")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None, ops: LinearOps | None = None) -> None:
        self._weight_OI = weight_OI
        self._bias_O = bias_O
        self._ops = ops
        self._product = F.linear if ops is None else ops.linear

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        return self._product(x_TI, self._weight_OI, self._bias_O)

    def silu_and_mul(self) -> Callable[[Tensor], Tensor] | None:
        """As `GatingLinear` says."""
        if self._ops is None:
            return None
        return partial(self._ops.linear_silu_and_mul, weight_OI=self._weight_OI, bias_O=self._bias_O)


class PackedLinear:
    """The weight reordered for the CPU's vector units; see kernels/packed_linear.py."""

    __slots__ = ("_bias_O", "_packed_OI")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> None:
        self._packed_OI = pack(weight_OI)
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        return packed_linear(x_TI, self._packed_OI, self._bias_O)


class SmallLinear:
    """A weight that the processor's cache holds, by columns; several rows go by a packed copy where there is one."""

    __slots__ = ("_bias_O", "_packed_OI", "_weights_IO")

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None, *, packs: bool = False) -> None:
        self._weights_IO = columns(weight_OI)
        self._packed_OI = pack(weight_OI) if packs else None
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        if self._packed_OI is None or x_TI.shape[0] == 1:
            return plain_linear(x_TI, self._weights_IO, self._bias_O)
        return packed_linear(x_TI, self._packed_OI, self._bias_O)


class DenseMethod:
    """Linear layers as the checkpoint has them, in the model's type."""

    def __init__(self, ops: LinearOps | None = None) -> None:
        self._ops = ops

    def load(self, weights: Weights, shape: LinearShape) -> Linear:
        """One matrix for all that is fused."""
        return DenseLinear(*load_fused(weights, shape), self._ops)

    def tie(self, table_VE: Tensor) -> tuple[Embedding, Linear]:
        """The table itself, twice."""
        return embedding(table_VE), DenseLinear(table_VE, None, self._ops)


class PackingMethod:
    """Each weight packed where that pays, and as it is elsewhere."""

    def load(self, weights: Weights, shape: LinearShape) -> Linear:
        """One matrix for all that is fused."""
        return self.wrap(*load_fused(weights, shape))

    def tie(self, table_VE: Tensor) -> tuple[Embedding, Linear]:
        """The table, and a packed copy of it where it pays to pack: embeddings cannot be read from that."""
        return embedding(table_VE), self.wrap(table_VE)

    def wrap(self, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        """The fastest for the weight, of those that give a row the same bits with any number of others."""
        if not can_pack(weight_OI):
            return DenseLinear(weight_OI, bias_O)
        if can_be_plain(weight_OI):
            return SmallLinear(weight_OI, bias_O, packs=not plain_is_fast())
        return PackedLinear(weight_OI, bias_O)


class NativeMethod:
    """Each weight packed for our own product, and kept in no other way."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._memory = WeightMemory()

    def load(self, weights: Weights, shape: LinearShape) -> Linear:
        """One matrix for all that is fused."""
        scratch = partial(self._memory.scratch, dtype=weights.empty(0).dtype)
        return NativeLinear(self._library, self._memory, *load_fused(weights, shape, scratch))

    def tie(self, table_VE: Tensor) -> tuple[Embedding, Linear]:
        """Both from the packed table."""
        linear = NativeLinear(self._library, self._memory, table_VE)
        return linear.embed, linear


class AdaptableMethod:
    """Linear layers as another method has them; to the projections adapters may add. lora: where these lie."""

    def __init__(self, method: LinearMethod, lora: LoraLayers) -> None:
        self.lora = lora
        self.load, self.tie = method.load, method.tie


class Projection:
    """A linear layer inside a block, and what adapters add to it, where the model takes any.

    Where ranks share its inputs, each has a part of a sum, adapters included, which all of them then add up.
    """

    __slots__ = ("_add_up", "_linear", "_lora", "_silu_and_mul")

    def __init__(self, linear: LinearMethod, weights: Weights, shape: LinearShape) -> None:
        self._linear = linear.load(weights, shape)
        self._silu_and_mul = self._linear.silu_and_mul() if isinstance(self._linear, GatingLinear) else None
        self._lora = None
        if isinstance(linear, AdaptableMethod):
            self._lora = linear.lora.new_layer(shape.outputs, shape.num_inputs, shape.split)
        group = weights.shard.group
        self._add_up = group.all_reduce if group is not None and shape.split is Split.INPUTS else None

    def __call__(self, x_TI: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, I] to [T, O]."""
        out_TO = self._linear(x_TI)
        if batch.lora is not None and self._lora is not None:
            self._lora.add(out_TO, x_TI, batch.lora)
        if self._add_up is not None:
            self._add_up(out_TO)
        return out_TO

    def silu_and_mul(self, x_TI: Tensor, batch: ForwardBatch, ops: Ops) -> Tensor:
        """silu(a) * b, [T, O / 2], of the halves of its outputs: as they are computed, where the layer can do that."""
        if self._silu_and_mul is None or batch.lora is not None:
            return ops.silu_and_mul(self(x_TI, batch))
        return self._silu_and_mul(x_TI)


def embedding(table_VE: Tensor) -> Embedding:
    """Rows of a table as it is."""
    return partial(F.embedding, weight=table_VE)


def load_fused(
    weights: Weights, shape: LinearShape, empty: Callable[[int, int], Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Weight and bias whose rows are the checkpoint's matrices, one below the other: [O, I] and [O].

    empty: where the weight goes, by default to memory of its own.
    """
    num_outputs = sum(shape.outputs.values())
    weight_OI = (empty or weights.empty)(num_outputs, shape.num_inputs)
    bias_O = weights.empty(num_outputs) if shape.bias else None
    start = 0
    for name, size in shape.outputs.items():
        rows = slice(start, start + size)
        fill_share(weights, weight_OI[rows], f"{name}.weight", shape.split)
        if bias_O is not None:
            _fill_bias(weights, bias_O[rows], f"{name}.bias", shape.split)
        start += size
    return weight_OI, bias_O


def _fill_bias(weights: Weights, bias_O: Tensor, name: str, split: Split | None) -> None:
    """Where each rank has a part of the sum, one of them adds the bias."""
    if split is not Split.INPUTS:
        fill_share(weights, bias_O, name, split)
    elif weights.shard.rank == 0:
        weights.fill(bias_O, name)
    else:
        weights.skip(name)
        bias_O.zero_()


def fill_share(weights: Weights, out: Tensor, name: str, split: Split | None) -> None:
    """Write a rank's share of a tensor into out; zeros where the tensor ends before the share does."""
    shard = weights.shard
    if split is None or shard.size == 1:
        weights.fill(out, name)
        return
    dim, full, share = split.dim, weights.shape(name)[split.dim], out.shape[split.dim]
    start = shard.start(split, full, share)
    there = out.narrow(dim, 0, max(0, min(share, full - start)))
    if there.shape != out.shape:
        out.zero_()
    weights.fill(there, name, Part(dim, min(start, full)))


class ShardedEmbedding:
    """Rows of a table of which this rank has some: others' are zeros here, and come by adding up."""

    def __init__(self, embed: Embedding, shard: Shard, num_rows: int) -> None:
        self._embed = embed
        self._add_up = None if shard.group is None else shard.group.all_reduce
        self._start = shard.start(Split.VOCABULARY, 0, num_rows)
        self._num_rows = num_rows

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """[T] to [T, E]."""
        own_T = token_ids_T - self._start
        is_others_T = (own_T < 0) | (own_T >= self._num_rows)
        out_TE = self._embed(own_T.masked_fill_(is_others_T, 0)).masked_fill_(is_others_T[:, None], 0.0)
        if self._add_up is not None:
            self._add_up(out_TE)
        return out_TE


class ShardedHead:
    """Logits of which each rank makes some; rank 0 has all of them, and others what they made."""

    def __init__(self, head: Linear, shard: Shard, vocab_size: int) -> None:
        self._head = head
        self._group = shard.group
        self._vocab_size = vocab_size

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[S, E] to [S, V]."""
        own_SV = self._head(x_TI)
        parts = None if self._group is None else self._group.gather(own_SV)
        return own_SV if parts is None else cat(parts, 1)[:, : self._vocab_size].contiguous()


def load_tensor(weights: Weights, name: str, *shape: int) -> Tensor:
    """A parameter that is one tensor of the checkpoint: a norm's weight, an embedding."""
    out = weights.empty(*shape)
    weights.fill(out, name)
    return out


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one matrix (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, spec: ModelSpec, ops: Ops, weights: Weights, linear: LinearMethod, prefix: str) -> None:
        size, hidden = spec.intermediate_size, spec.hidden_size
        gate_up = {f"{prefix}.gate_proj": size, f"{prefix}.up_proj": size}
        down = {f"{prefix}.down_proj": hidden}
        self._gate_up = Projection(linear, weights, LinearShape(gate_up, hidden, spec.mlp_bias, Split.OUTPUTS))
        self._down = Projection(linear, weights, LinearShape(down, size, spec.mlp_bias, Split.INPUTS))
        self._ops = ops

    def __call__(self, x_TE: Tensor, batch: ForwardBatch) -> Tensor:
        """[T, E] to [T, E]."""
        return self._down(self._gate_up.silu_and_mul(x_TE, batch, self._ops), batch)

"""Where a model's adapters lie (LoRA: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022).

Each of a few slots has room for one adapter: the factors of all linear layers, of the largest rank that is allowed, one
behind the other in one row of memory, which stays where it is. So an adapter is brought into a slot by one copy, and a
captured launch finds whatever is there:

    slot 0 | q k v of layer 0: A, B | o: A, B | gate up: A, B | down: A, B | q k v of layer 1 ...
    slot 1 | ...

Knows shapes and slots. Does not know files (peft.py), names, or which slot is whose (runner/adapters.py). Shape
letters: kernels/ops.py; N numbers of a slot.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from aserve.kernels.ops import LoraBatch, LoraWeights, Ops
from aserve.models.peft import Module, PeftFolder, PeftReader
from aserve.models.sharding import ALONE, Shard, Split

RANK_STEP: Final = 16
"""Ranks are padded to a multiple of it: a tile of a product on a GPU, a vector of a CPU."""


class Factors(NamedTuple):
    """An adapter on the host, as a slot holds it."""

    numbers_N: Tensor
    rank: int


class LoraLayer:
    """One linear layer of P parts. first: where its factors begin in a slot."""

    __slots__ = ("_add_lora", "_num_a", "first", "num_inputs", "outputs", "split", "weights")

    def __init__(
        self, ops: Ops, outputs: Mapping[str, int], num_inputs: int, split: Split | None, rank: int, first: int
    ) -> None:
        self._add_lora = ops.add_lora
        self.outputs = dict(outputs)
        self.num_inputs = num_inputs
        self.split = split
        self.first = first
        self._num_a = len(outputs) * num_inputs * rank
        self.weights: LoraWeights | None = None

    def end(self, rank: int) -> int:
        """Where the next layer's factors begin."""
        return self.first + self._num_a + rank * sum(self.outputs.values())

    def factors_in(self, memory_GN: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """A [G, P, I, R] and B [G, R, O]: views of slots."""
        num_slots, middle = len(memory_GN), self.first + self._num_a
        a_GPIR = memory_GN[:, self.first : middle].view(num_slots, len(self.outputs), self.num_inputs, rank)
        b_GRO = memory_GN[:, middle : self.end(rank)].view(num_slots, rank, sum(self.outputs.values()))
        return a_GPIR, b_GRO

    def add(self, out_TO: Tensor, x_TI: Tensor, batch: LoraBatch) -> None:
        """Write to out what the adapters of a step's rows make of x."""
        assert self.weights is not None, "slots are allocated before the first step"
        self._add_lora(out_TO, x_TI, self.weights, batch)


class LoraLayers:
    """The slots of one model, and where in each its layers' factors lie.

    num_slots: adapters that one step may have. max_rank: of an adapter. dtype: the model's. shard: whose share of each
    adapter is kept: of a layer that ranks share by outputs all of A and some of B, by inputs some of A and all of B.
    """

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        self._shard = shard
        self._whole: Mapping[str, Module] | None = None
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._rank = -(-max_rank // RANK_STEP) * RANK_STEP
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._layers: list[LoraLayer] = []
        self._memory_GN = torch.empty(num_slots, 0)
        self._ranks_G = torch.zeros(num_slots, dtype=torch.int32, device=device)

    def new_layer(self, outputs: Mapping[str, int], num_inputs: int, split: Split | None = None) -> LoraLayer:
        """Room for one more layer. outputs: names of its parts, and how many outputs each has. split: among ranks."""
        first = self._layers[-1].end(self._rank) if self._layers else 0
        layer = LoraLayer(self._ops, outputs, num_inputs, split, self._rank, first)
        self._layers.append(layer)
        return layer

    def allocate(self, whole: Mapping[str, Module] | None = None) -> None:
        """Memory for the slots, when all layers are known. Raises torch's error where there is none.

        whole: shapes of the model's layers by name, where this is a rank's share of them.
        """
        self._whole = whole
        num_numbers = self._layers[-1].end(self._rank) if self._layers else 0
        self._memory_GN = torch.zeros(self.num_slots, num_numbers, dtype=self._dtype, device=self._device)
        for layer in self._layers:
            factors = layer.factors_in(self._memory_GN, self._rank)
            layer.weights = LoraWeights(*factors, self._ranks_G, tuple(layer.outputs.values()))

    @property
    def num_bytes(self) -> int:
        """Of an adapter: in a slot, and on the host."""
        return self._memory_GN.shape[1] * self._memory_GN.element_size()

    @property
    def modules(self) -> dict[str, Module]:
        """By name, the shapes of the checkpoint's linear layers that adapters may change."""
        own = {name: Module(layer.num_inputs, size) for layer in self._layers for name, size in layer.outputs.items()}
        return own if self._whole is None else {name: self._whole[name] for name in own}

    def read(self, folder: PeftFolder) -> Factors:
        """An inspected adapter, as a slot holds it. Raises `AdapterError` for values that are not finite."""
        numbers_N = torch.zeros(self._memory_GN.shape[1], dtype=self._dtype, pin_memory=self._device.type == "cuda")
        with PeftReader(folder, self._shard) as reader:
            for layer in self._layers:
                a_1PIR, b_1RO = layer.factors_in(numbers_N[None], self._rank)
                parts = b_1RO[0].split_with_sizes(list(layer.outputs.values()), 1)
                for name, a_IR, b_RO in zip(layer.outputs, a_1PIR[0], parts, strict=True):
                    reader.fill(name, a_IR[:, : folder.rank], b_RO[: folder.rank], layer.split)
        return Factors(numbers_N, folder.rank)

    def blank(self) -> Factors:
        """An adapter that changes nothing, of the largest rank."""
        return Factors(torch.zeros_like(self._memory_GN[0], device="cpu"), self._rank)

    def put(self, slot: int, factors: Factors) -> None:
        """Bring an adapter into a slot, on the current stream."""
        self._memory_GN[slot].copy_(factors.numbers_N, non_blocking=True)
        self._ranks_G[slot] = factors.rank

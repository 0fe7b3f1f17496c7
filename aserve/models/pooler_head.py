"""PoolerHead: what is done with pooled hidden states: dense layers, labels' scores, or nothing. In float32.

    embed                    pooled -> dense, activation, ... -> vector
    classify, own head       pooled -> score.weight -> a number for each label
    classify, by tokens      pooled -> rows of the output head -> a number for each token; of two tokens, the second's
                             less the first's: its sigmoid is the second's share of both (Qwen3-Reranker)

Shape letters: N sequences, E hidden size, O outputs.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from aserve.core.errors import CheckpointError
from aserve.models.checkpoint import Checkpoint
from aserve.models.inspection import HEAD, SCORE
from aserve.models.pooling import DenseSpec, PoolingPlan
from aserve.models.weights import RandomWeights, check_finite

EMBEDDINGS: Final = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")
"""Names of what a tied output head is."""

Step = tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]
"""Weight, bias, and what follows."""


class PoolerHead:
    """Linear layers, in a row; none leaves what is pooled as it is."""

    def __init__(self, steps: Sequence[Step] = ()) -> None:
        self._steps = steps

    def __call__(self, pooled_NE: Tensor) -> Tensor:
        """[N, O], float32."""
        x = pooled_NE.float()
        for weight, bias, activation in self._steps:
            x = activation(F.linear(x, weight, bias))
        return x


def load_head(
    checkpoint: Checkpoint,
    plan: PoolingPlan,
    hidden_size: int,
    token_ids: Sequence[int],
    device: torch.device,
    seed: int | None,
) -> PoolerHead:
    """What the plan asks for. token_ids: of `plan.token_names`. seed: draw the weights instead of reading them.

    Raises `CheckpointError` for layers that do not fit one another.
    """
    if plan.token_names:
        weight = _token_weight(checkpoint, token_ids, hidden_size, seed)
        if len(token_ids) == 2:
            weight = weight[1:] - weight[:1]
        return PoolerHead([(weight.to(device), None, _identity)])
    if plan.has_head and plan.pooling.is_causal:
        weight = torch.empty(plan.pooling.size, hidden_size)
        _fill(checkpoint, weight, (SCORE,), seed)
        return PoolerHead([(weight.to(device), None, _identity)])
    steps = []
    for dense in plan.dense:
        if dense.num_in != hidden_size:
            raise CheckpointError(f"{dense.folder}: in_features is {dense.num_in}, and {hidden_size} come in")
        steps.append(_dense(dense, device))
        hidden_size = dense.num_out
    return PoolerHead(steps)


def _identity(x: Tensor) -> Tensor:
    return x


def _dense(dense: DenseSpec, device: torch.device) -> Step:
    path = dense.folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        weight, bias = (
            file.get_tensor(name).float() if has_it else None
            for name, has_it in (("linear.weight", True), ("linear.bias", dense.has_bias))
        )
    if weight is None or weight.shape != (dense.num_out, dense.num_in):
        raise CheckpointError(f"{path}: linear.weight does not have the shape that config.json says")
    check_finite("linear.weight", weight)
    activation: Callable[[Tensor], Tensor] = getattr(nn, dense.activation)()
    return weight.to(device), None if bias is None else bias.to(device), activation


def _token_weight(checkpoint: Checkpoint, token_ids: Sequence[int], hidden_size: int, seed: int | None) -> Tensor:
    """The rows of the output head, tied or not, that score these tokens."""
    weight = torch.empty(len(token_ids), hidden_size)
    is_tied = checkpoint.config.get("tie_word_embeddings") is True
    _fill(checkpoint, weight, EMBEDDINGS if is_tied else (HEAD, *EMBEDDINGS), seed, token_ids)
    return weight


def _fill(
    checkpoint: Checkpoint, out: Tensor, names: Sequence[str], seed: int | None, rows: Sequence[int] | None = None
) -> None:
    """Write the tensor of the first of these names that there is, or those rows of it."""
    if seed is not None:
        RandomWeights(out.dtype, out.device, seed).fill(out, names[0])
        return
    for name in names:
        for path in checkpoint.weight_files:
            with safe_open(path, framework="pt") as file:
                if name not in file.keys():  # noqa: SIM118  (safe_open cannot be iterated)
                    continue
                tensor = file.get_slice(name)
                found = tensor[:] if rows is None else torch.cat([tensor[row : row + 1] for row in rows])
                if found.shape != out.shape:
                    raise CheckpointError(f"tensor {name} is {list(found.shape)}, but {list(out.shape)} is asked for")
                out.copy_(found)
                check_finite(name, out)
                return
    raise CheckpointError(f"the checkpoint has no tensor {names[0]}")

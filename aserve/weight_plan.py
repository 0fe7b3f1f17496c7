"""What a model's weights will take, told from its files' headers or from its config: no weight is read.

memory      every weight in the type it is served in, or quantized, with its scales
per token   what a step with one sequence reads of that: all of it, but of an embedding table one row
"""

from collections.abc import Mapping
from math import prod
from typing import Final

import msgspec

from aserve.core.config import Options
from aserve.core.quantization import QUANTIZATIONS
from aserve.models.checkpoint import Checkpoint
from aserve.models.inspection import COMPUTED, HEAD, native_tensors, read_headers
from aserve.models.quantized_formats import as_served, quantized_weights
from aserve.models.spec import DTYPE_BYTES, FAMILIES, ModelSpec, dtype_name

TABLE: Final = "embed_tokens.weight"
SCALE_BYTES: Final = 4


class WeightPlan(msgspec.Struct, frozen=True, kw_only=True):
    """num_parameters: numbers in the checkpoint. file_bytes: of its weights; 0 where they are made up.

    memory_bytes: once loaded. bytes_per_token: of these, read for each token of one answer.
    """

    num_parameters: int
    file_bytes: int
    memory_bytes: int
    bytes_per_token: int


def plan_weights(
    checkpoint: Checkpoint, spec: ModelSpec | None, options: Options, *, copies_tied_head: bool = False
) -> WeightPlan:
    """Of a checkpoint under these options. spec: its shape; None where it is not known.

    copies_tied_head: where the embedding table is the output head too, the head is a copy, packed in another way.
    """
    shapes = _shapes(checkpoint, spec, options)
    is_native = spec is not None and spec.architecture in FAMILIES
    is_tied = spec is not None and spec.tie_embeddings
    if is_native and is_tied:
        shapes.pop(HEAD, None)
    dtype_bytes = DTYPE_BYTES[dtype_name(checkpoint.config, options.dtype)]
    kept = None if options.quantization is None else QUANTIZATIONS[options.quantization]
    group = None if kept is None else kept.group
    head_group = None if kept is None or kept.keeps_head else kept.group
    memory = per_token = 0
    for name, shape in shapes.items():
        is_head = name == HEAD or name.endswith(TABLE)
        as_is, quantized = (
            prod(shape) * dtype_bytes,
            _linear_bytes(shape, dtype_bytes, head_group if is_head else group),
        )
        if not name.endswith(TABLE):
            memory, per_token = memory + quantized, per_token + quantized
        elif not is_tied:
            memory += as_is
        elif head_group is None and not copies_tied_head:
            memory, per_token = memory + as_is, per_token + as_is
        else:
            memory, per_token = memory + as_is + quantized, per_token + quantized
    return WeightPlan(
        num_parameters=sum(map(prod, shapes.values())),
        file_bytes=sum(file.stat().st_size for file in checkpoint.weight_files),
        memory_bytes=memory,
        bytes_per_token=per_token,
    )


def _shapes(checkpoint: Checkpoint, spec: ModelSpec | None, options: Options) -> dict[str, tuple[int, ...]]:
    """By name, of the tensors that are served."""
    if checkpoint.weight_files and options.load_format != "dummy":
        headers = read_headers(checkpoint)
        headers = as_served(headers, quantized_weights(checkpoint.config, headers))
        return {name: tensor.shape for name, tensor in headers.items() if not name.endswith(COMPUTED)}
    if spec is not None and spec.architecture in FAMILIES:
        return {name: tuple(dim.size for dim in dims) for name, dims in native_tensors(spec)}
    return {} if spec is None else dict(_rough_shapes(spec))


def _rough_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Of an architecture that transformers computes, taken to be of Llama's shape."""
    heads = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    layers = {"layers": (spec.num_layers, spec.hidden_size, heads + 3 * spec.intermediate_size)}
    head = {} if spec.tie_embeddings else {HEAD: (spec.vocab_size, spec.hidden_size)}
    return {TABLE: (spec.vocab_size, spec.hidden_size), **layers, **head}


def _linear_bytes(shape: tuple[int, ...], dtype_bytes: int, group: int | None) -> int:
    """Of a weight; vectors are never quantized."""
    if group is None or len(shape) != 2:
        return prod(shape) * dtype_bytes
    num_outputs, num_inputs = shape
    num_scales = num_outputs * (1 if group == 0 else -(-num_inputs // group))
    return num_outputs * num_inputs + num_scales * SCALE_BYTES

"""From a checkpoint to a model that can run: aserve's own formula where there is one, transformers otherwise.

Native families never import transformers, which would triple the time to start.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from aserve.core.errors import CheckpointError, ConfigError
from aserve.core.quantization import cache_dtype_name, why_not
from aserve.kernels.native.native_linear import can_be_native
from aserve.kernels.native.native_ops import NativeOps
from aserve.kernels.ops import LinearOps, Ops
from aserve.models.checkpoint import Checkpoint
from aserve.models.inspection import SCORE, full_name, native_tensors, read_headers
from aserve.models.interface import CausalLM
from aserve.models.layers import AdaptableMethod, DenseMethod, LinearMethod, NativeMethod, PackingMethod
from aserve.models.lora import LoraLayers
from aserve.models.peft import Module
from aserve.models.quantized import quantizing_method
from aserve.models.quantized_formats import quantized_weights
from aserve.models.rope import rope_table
from aserve.models.sharding import ALONE, Shard, share_of
from aserve.models.spec import FAMILIES, ModelSpec, dtype_name, read_architecture, read_spec
from aserve.models.weights import RandomWeights, ReadProgress, SafetensorsWeights, Weights

NativeModel = Callable[[ModelSpec, Ops, Weights, LinearMethod, Tensor], CausalLM]
"""Makes a model from its weights and a rope table."""


def no_progress(stage: str, done: int, total: int) -> None:
    """Report to nobody."""


def load_model(  # noqa: PLR0913  (each a wish of the user, most with a default)
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    ops: Ops,
    load_format: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    trust_remote_code: bool = False,
    max_model_len: int | None = None,
    batch_invariant: bool = False,
    quantization: str | None = None,
    lora: LoraLayers | None = None,
    shard: Shard = ALONE,
    progress: ReadProgress = no_progress,
) -> CausalLM:
    """The model on its device, ready for `forward` under torch.inference_mode.

    load_format: auto or safetensors read the weights, dummy draws them from seed. dtype: a torch type by name, or auto,
    the checkpoint's. max_model_len: positions that will be used, all of the model's by default. batch_invariant: refuse
    a model whose rows may depend on one another. quantization: of `QUANTIZATIONS`, how linear layers are kept. lora:
    where its adapters will lie. shard: whose share this is. Raises `CheckpointError`, one line, where config and
    weights do not make a model that aserve can serve, `ConfigError` for a quantization that there is not for it here.
    """
    device = torch.device(device)
    torch_dtype = read_dtype(checkpoint, dtype)
    dummy = load_format == "dummy"
    architecture = read_architecture(checkpoint.config)
    is_native = architecture in FAMILIES
    if quantization is not None:
        where = {"device": device.type, "dtype": dtype_name(checkpoint.config, dtype)}
        if reason := why_not(quantization, architecture=architecture, is_native=is_native, **where):
            raise ConfigError(reason)
    if not is_native:
        if batch_invariant:
            raise CheckpointError(f"{architecture} runs through transformers, whose products are not batch_invariant")
        if lora is not None:
            raise CheckpointError(f"{architecture} runs through transformers, and takes no adapters (enable_lora)")
        assert shard.size == 1, "what transformers computes is not shared by ranks (planning.check_ranks)"
        # Imported here: transformers takes seconds, and only its own models need it.
        from aserve.models.transformers_backend import load_backend_model

        num_bytes = sum(path.stat().st_size for path in checkpoint.weight_files)
        progress("weights", 0, num_bytes)
        backend_model = load_backend_model(
            checkpoint, torch_dtype, device, ops, seed=seed if dummy else None, trust_remote_code=trust_remote_code
        )
        progress("weights", num_bytes, num_bytes)
        return backend_model

    whole = read_spec(checkpoint.config, has_head=not checkpoint.pools)
    spec = share_of(whole, shard.size)
    num_positions = min(max_model_len or spec.context_len, spec.context_len)
    linear = linear_method(ops, torch_dtype, device, quantization)
    shapes = {name: tuple(dim.size for dim in dims) for name, dims in native_tensors(whole)} if shard.size > 1 else {}
    build = partial(_build, spec, ops, linear, num_positions, device, lora, shapes)
    if dummy:
        return build(RandomWeights(torch_dtype, device, seed, shard, shapes))
    return _load_stored(checkpoint, torch_dtype, device, shard, progress, build)


def _load_stored(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    progress: ReadProgress,
    build: Callable[[Weights], CausalLM],
) -> CausalLM:
    """With the weights of its files, all of which have to be asked for."""
    names = read_headers(checkpoint)
    renamed = {name: full_name(name, names) for name in names} if checkpoint.pools else {}
    tensors = {renamed.get(name, name): tensor for name, tensor in names.items()}
    quantized = quantized_weights(checkpoint.config, tensors)
    with SafetensorsWeights(checkpoint.weight_files, dtype, device, progress, renamed, shard, quantized) as weights:
        if checkpoint.pools:
            weights.skip(full_name(SCORE, names))
        model = build(weights)
        weights.finish()
    return model


def read_dtype(checkpoint: Checkpoint, wish: str) -> torch.dtype:
    """The type of weights and activations: the wish, or for auto the config's, or float32 where it names none."""
    found: torch.dtype = getattr(torch, dtype_name(checkpoint.config, wish))
    return found


def cache_dtype_of(dtype: torch.dtype, wish: str) -> torch.dtype:
    """The type of keys and values. dtype: the model's. wish: of `KV_CACHE_DTYPES`."""
    found: torch.dtype = getattr(torch, cache_dtype_name(wish, str(dtype).removeprefix("torch.")))
    return found


def _build(
    spec: ModelSpec,
    ops: Ops,
    linear: LinearMethod,
    num_positions: int,
    device: torch.device,
    lora: LoraLayers | None,
    whole_shapes: Mapping[str, tuple[int, ...]],
    weights: Weights,
) -> CausalLM:
    """whole_shapes: of the model's tensors by name, where this is a rank's share of it; else none."""
    assert spec.rope is not None, "every native family is rotary"
    cos_sin_LD = rope_table(spec.rope, spec.head_dim, num_positions, device)
    method = linear if lora is None else AdaptableMethod(linear, lora)
    model = native_model(spec.architecture)(spec, ops, weights, method, cos_sin_LD)
    if lora is not None:
        matrices = {name: shape for name, shape in whole_shapes.items() if len(shape) == 2}
        modules = {name.removesuffix(".weight"): Module(shape[1], shape[0]) for name, shape in matrices.items()}
        lora.allocate(modules or None)
    return model


def native_model(architecture: str) -> NativeModel:
    """What makes a family's model."""
    module, _, name = FAMILIES[architecture].model.partition(":")
    found: NativeModel = getattr(import_module(f"aserve.models.{module}"), name)
    return found


def linear_method(ops: Ops, dtype: torch.dtype, device: torch.device, quantization: str | None = None) -> LinearMethod:
    """Products of the operations' own where they have some, else packed where that pays.

    Raises `ConfigError` for a quantization of which there is no product.
    """
    if quantization is not None:
        return quantizing_method(ops, quantization, device)
    if isinstance(ops, LinearOps):
        return DenseMethod(ops)
    if isinstance(ops, NativeOps) and can_be_native(dtype):
        return NativeMethod(ops.library)
    return PackingMethod()

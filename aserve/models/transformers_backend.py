"""Any decoder that transformers can attend by interface, over aserve's paged cache.

transformers computes the architecture, positions included, on all of the step's tokens as one flattened row; where it
would attend, `attend_in_cache` takes over, registered under aserve's own name. What it needs of the step travels
through forward's keyword arguments:

  forward(token_ids [1, T], position_ids [1, T], aserve_step=PagedStep)  -> ... each layer ... -> attend_in_cache

The model's shape is not read from the config, whose spelling differs by architecture: one probing token goes through
the layers and tells. A model that does not attend as the cache needs it is refused there, in one line. Shape letters:
kernels/ops.py. Importing this module imports transformers, and changes nothing in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.utils import logging as transformers_logging

from aserve.core.errors import CheckpointError
from aserve.kernels.ops import AttentionBatch, KVLayer, Ops
from aserve.models.checkpoint import Checkpoint
from aserve.models.spec import FULL, SLIDING, ModelSpec, read_architecture
from aserve.models.weights import RandomWeights

ATTENTION: Final = "aserve"

HARMLESS: Final = frozenset(
    {"dropout", "is_causal", "position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits"}
)
"""Keyword arguments of attention that change nothing here. Any other that is set would be ignored, so it is refused."""

FOREIGN_ERRORS: Final = (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What code that knows nothing of aserve may raise when it is built or first run."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's wish for attention. layer None: the module does not say which layer it is.

    mask: what came of the mask that `forward` was given. others: keyword arguments that are not read here.
    """

    layer: int | None
    causal: bool
    scale: float
    window: int | None
    soft_cap: float | None
    mask: Tensor | None
    others: Mapping[str, Any]


class Step(Protocol):
    """Who answers attention during one forward pass."""

    def attend(self, call: LayerCall, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step over the paged cache."""

    ops: Ops
    kv: Sequence[KVLayer]
    batch: AttentionBatch

    def attend(self, call: LayerCall, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Write the keys and values, which the architecture has rotated where it does, and attend to the context."""
        assert call.layer is not None, "the probe refused models whose layers have no index"
        cache = self.kv[call.layer]
        batch = self.batch.of(cache)
        self.ops.write_kv(k_TKD, v_TKD, cache.k_BPKD, cache.v_BPKD, batch.slots_T)
        return self.ops.attend(
            q_THD,
            cache.k_BPKD,
            cache.v_BPKD,
            batch,
            scale=call.scale,
            sliding_window=call.window,
            soft_cap=call.soft_cap,
        )


@dataclass(frozen=True, slots=True)
class Probe:
    """A step of one token that notes each layer's call and the shapes of its q, k and v."""

    calls: list[LayerCall] = field(default_factory=list)
    shapes: list[tuple[torch.Size, torch.Size, torch.Size]] = field(default_factory=list)

    def attend(self, call: LayerCall, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Zeros."""
        self.calls.append(call)
        self.shapes.append((q_THD.shape, k_TKD.shape, v_TKD.shape))
        return torch.zeros_like(q_THD)


def attend_in_cache(  # noqa: PLR0913  (transformers' signature)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    aserve_step: Step | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q, k, v [1, heads, T, D] to ([1, T, H, D], no attention weights)."""
    if aserve_step is None:
        raise TypeError("its layers do not hand keyword arguments on to attention")
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    call = LayerCall(
        layer=getattr(module, "layer_idx", None),
        causal=getattr(module, "is_causal", True) and others.get("is_causal") is not False,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        soft_cap=softcap,
        mask=attention_mask,
        others=others,
    )
    return aserve_step.attend(call, q_THD, k_TKD, v_TKD)[None], None


def no_mask(**_: Any) -> None:
    """transformers' mask function: the batch says what each token may see."""


class GivenHidden(nn.Module):
    """Stands where the decoder was, so that the architecture's own forward makes logits of given hidden states."""

    def __init__(self, output_type: type) -> None:
        super().__init__()
        self._output_type = output_type

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """The "embeddings" are the hidden states, in the kind of output that the decoder gives."""
        return self._output_type(last_hidden_state=inputs_embeds)


class TransformersModel:
    """A `CausalLM` whose layers transformers computes. Takes the model over, and takes its decoder out of it."""

    def __init__(self, model: Any, architecture: str, ops: Ops) -> None:
        self._ops = ops
        self._decoder = model.get_decoder()
        if self._decoder is model:
            raise TypeError("it has no decoder apart from its head")
        # A mask of four dimensions is passed on as it is. Without one, transformers compares positions on the host to
        # find out whether sequences are packed, which waits for the device.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        probe = Probe()
        with torch.inference_mode():
            zero_T = torch.zeros(1, dtype=torch.int64, device=model.device)
            output = self._decode(zero_T, zero_T, probe)
            self._head = _with_decoder(model, GivenHidden(type(output)))
            vocab_size = self.logits(output.last_hidden_state[0]).shape[-1]
        config = model.config.get_text_config()
        _check_calls(config, probe)
        self.spec = _spec(config, architecture, probe, output.last_hidden_state.shape[-1], vocab_size)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, kv: Sequence[KVLayer], batch: AttentionBatch) -> Tensor:
        """Hidden states, [T, E]."""
        output = self._decode(token_ids_T, positions_T, PagedStep(self._ops, kv, batch))
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """[S, V], float32, with the architecture's scaling and soft cap."""
        logits: Tensor = self._head(inputs_embeds=hidden_SE[None], use_cache=False, return_dict=True).logits
        return logits[0].float()

    def _decode(self, token_ids_T: Tensor, positions_T: Tensor, step: Step) -> Any:
        return self._decoder(
            input_ids=token_ids_T[None],
            position_ids=positions_T[None],
            attention_mask=self._mask,
            use_cache=False,
            return_dict=True,
            aserve_step=step,
        )


def load_backend_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    *,
    seed: int | None,
    trust_remote_code: bool,
) -> TransformersModel:
    """Build the model of a checkpoint, from its folder alone; seed: draw the weights instead of reading them.

    Raises `CheckpointError`, one line, for a model that transformers cannot load or cannot attend by interface.
    """
    architecture = read_architecture(checkpoint.config)
    _check_class(architecture, trust_remote_code)
    AttentionInterface.register(ATTENTION, attend_in_cache)
    AttentionMaskInterface.register(ATTENTION, no_mask)
    local = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    options = {"dtype": dtype, "attn_implementation": ATTENTION, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, **local)
        if seed is None:
            model = _read_model(checkpoint, options | local)
        else:
            model = _random_model(config, options, RandomWeights(dtype, device, seed), device)
        return TransformersModel(model.to(device).eval(), architecture, ops)
    except FOREIGN_ERRORS as error:
        reason = next(iter(str(error).splitlines()), "")[:200]
        raise CheckpointError(
            f"{architecture} does not run through transformers: {type(error).__name__}: {reason}"
        ) from error


def _check_class(architecture: str, trust_remote_code: bool) -> None:
    """Refuse what transformers itself says cannot attend by interface, before any weight is read."""
    model_class = getattr(transformers, architecture, None)
    if model_class is None and not trust_remote_code:
        raise CheckpointError(f"{architecture}: neither aserve nor transformers {transformers.__version__} knows it")
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        raise CheckpointError(f"{architecture}: transformers does not attend by interface in it, so it cannot be paged")


def _read_model(checkpoint: Checkpoint, options: Mapping[str, Any]) -> Any:
    with _without_progress_bars():
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.path, use_safetensors=True, output_loading_info=True, **options
        )
    for problem in ("missing_keys", "mismatched_keys"):
        if report.get(problem):
            names = ", ".join(str(key) for key in sorted(report[problem])[:3])
            raise CheckpointError(f"{checkpoint.path}: weights do not fit the config: {problem} {names}")
    return model


def _random_model(config: Any, options: Mapping[str, Any], weights: RandomWeights, device: torch.device) -> Any:
    with torch.random.fork_rng():  # from_config draws from torch's global generator
        model = AutoModelForCausalLM.from_config(config, **options).to(device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weights.fill(parameter, name)
    return model


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """aserve reports progress itself; transformers' bars go to standard error of whoever embeds it."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _with_decoder(model: Any, decoder: nn.Module) -> Any:
    """The model with another decoder in its place. (Its own set_decoder leaves models without such an attribute be.)"""
    given = model.get_decoder()
    path = next(name for name, module in model.named_modules() if module is given)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, decoder)
    return model


def _spec(config: Any, architecture: str, probe: Probe, hidden_size: int, vocab_size: int) -> ModelSpec:
    """What the probe saw, and from the config only what it cannot see."""
    q_shape, k_shape, _ = probe.shapes[0]
    return ModelSpec(
        architecture=architecture,
        num_layers=len(probe.calls),
        num_heads=q_shape[1],
        num_kv_heads=k_shape[1],
        head_dim=k_shape[2],
        hidden_size=hidden_size,
        intermediate_size=0,
        vocab_size=vocab_size,
        context_len=_context_len(config),
        norm_eps=0.0,
        windows=tuple(call.window for call in probe.calls),
        rope=None,
        tie_embeddings=bool(config.tie_word_embeddings),
    )


def _check_calls(config: Any, probe: Probe) -> None:
    """Raise `CheckpointError` unless each layer attended once, causally, and in the way that the cache is laid out."""

    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(f"{config.model_type} cannot run over a paged cache: {reason}")

    layers = [call.layer for call in probe.calls]
    if layers != list(range(config.num_hidden_layers)):
        raise refuse(f"of {config.num_hidden_layers} layers {len(layers)} attend by transformers' interface")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "num_kv_shared_layers", 0):
        raise refuse("its layers share keys and values")
    if any(k_shape != v_shape for _, k_shape, v_shape in probe.shapes) or len(set(probe.shapes)) > 1:
        raise refuse("its heads differ in size or number")
    if not all(call.causal for call in probe.calls):
        raise refuse("its attention is not causal")
    if any(call.mask is not None and (call.mask.numel(), call.mask.dtype) != (1, torch.bool) for call in probe.calls):
        raise refuse("it makes an attention mask of its own")
    given = [item for call in probe.calls for item in call.others.items()]
    extra = sorted({name for name, value in given if value is not None and value is not False} - HARMLESS)
    if extra:
        raise refuse(f"its attention has {', '.join(extra)}")
    kinds = getattr(config, "layer_types", None) or [SLIDING if call.window else FULL for call in probe.calls]
    for call, kind in zip(probe.calls, kinds, strict=False):
        if kind not in (FULL, SLIDING) or (kind == SLIDING and call.window is None):
            raise refuse(f"layer {call.layer} has {kind}, and its mask is not known to attention")


def _context_len(config: Any) -> int:
    """The config's length; where rotary frequencies change with the length of the batch, the length up to there.

    transformers computes those (dynamic, longrope) from the longest position of the step, so that beyond the original
    length one request's answer would depend on its neighbours.
    """
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise CheckpointError("config.json: max_position_embeddings is missing")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            length = min(length, parameters.get("original_max_position_embeddings") or length)
    return length

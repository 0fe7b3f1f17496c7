"""Any decoder that transformers can attend by interface, over aserve's paged cache.

transformers computes the architecture, positions included, on all of the step's tokens as one flattened row; where it
would attend, `attend_in_cache` takes over, registered under aserve's own name. What it needs of the step travels
through forward's keyword arguments:

  forward(token_ids [1, T], position_ids [1, T], aserve_step=PagedStep)  -> ... each layer ... -> attend_in_cache

The model's shape is not read from the config, whose spelling differs by architecture: probing tokens go through the
layers and tell (transformers_probe.py). A model that does not attend as the cache needs it is refused there, in one
line. Shape letters: kernels/ops.py. Importing this module imports transformers, and changes nothing in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from aserve.core.errors import CheckpointError
from aserve.core.foreign import foreign
from aserve.core.layout import Window
from aserve.kernels.ops import AttentionBatch, KVLayer, Ops
from aserve.models.checkpoint import Checkpoint
from aserve.models.interface import ForwardBatch
from aserve.models.spec import ModelSpec, read_architecture
from aserve.models.transformers_loading import check_size, random_model, read_model
from aserve.models.transformers_probe import (
    LayerCall,
    Probe,
    check_calls,
    check_company,
    read_windows,
    refusal,
    rule_mask,
)
from aserve.models.weights import RandomWeights

ATTENTION: Final = "aserve"


class Step(Protocol):
    """Who answers attention during one forward pass."""

    def attend(self, call: LayerCall, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D]."""
        ...


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step over the paged cache. windows: of each layer."""

    ops: Ops
    kv: Sequence[KVLayer]
    batch: AttentionBatch
    windows: Sequence[Window]

    def attend(self, call: LayerCall, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Write the keys and values, which the architecture has rotated where it does, and attend to the context.

        The cache has heads of one size. Where keys and values differ in theirs (multi-head latent attention), zeros
        fill up the smaller: they change no score, and what comes of them is cut off.
        """
        assert call.layer is not None, "the probe refused models whose layers have no index"
        cache = self.kv[call.layer]
        batch = self.batch.of(cache)
        head_dim, value_dim = cache.k_BPKD.shape[-1], v_TKD.shape[-1]
        q_THD, k_TKD, v_TKD = (_fill_up(x, head_dim) for x in (q_THD, k_TKD, v_TKD))
        self.ops.write_kv(k_TKD, v_TKD, cache.k_BPKD, cache.v_BPKD, batch.slots_T)
        out_THD = self.ops.attend(
            q_THD,
            cache.k_BPKD,
            cache.v_BPKD,
            batch,
            scale=call.scale,
            sliding_window=self.windows[call.layer],
            soft_cap=call.soft_cap,
        )
        return out_THD[..., :value_dim]


def _fill_up(x: Tensor, head_dim: int) -> Tensor:
    return x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))


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
        raise CheckpointError(
            f"{type(module).__name__} of transformers is not handed forward's keyword arguments, by which attention "
            "would reach the paged cache"
        )
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
        config = model.config.get_text_config()
        self._decoder = _find_decoder(model)
        # A mask of four dimensions is passed on as it is. Without one, transformers compares positions on the host to
        # find out whether sequences are packed, which waits for the device.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        served, alone = Probe(), Probe()
        with torch.inference_mode():
            output = self._probe([0], served, self._mask)
            check_calls(config, served)
            self._probe([0], alone, torch.ones(1, 1, dtype=torch.int64, device=model.device))
            context_len = _context_len(config)
            windows = read_windows(config, served, alone, context_len)
            check_company(config, lambda ids, probe: self._probe(ids, probe, self._mask).last_hidden_state[0])
            self._head = _replace(model, self._decoder, GivenHidden(type(output)))
            vocab_size = self.logits(output.last_hidden_state[0]).shape[-1]
        q_shape, k_shape, v_shape = served.shapes[0]
        self.spec = ModelSpec(
            architecture=architecture,
            num_layers=len(windows),
            num_heads=q_shape[1],
            num_kv_heads=k_shape[1],
            head_dim=max(k_shape[2], v_shape[2]),
            hidden_size=output.last_hidden_state.shape[-1],
            intermediate_size=0,
            vocab_size=vocab_size,
            context_len=context_len,
            norm_eps=0.0,
            windows=windows,
            rope=None,
            tie_embeddings=bool(config.tie_word_embeddings),
        )

    def forward(self, token_ids_T: Tensor, kv: Sequence[KVLayer], batch: ForwardBatch) -> Tensor:
        """Hidden states, [N, E]. All are computed."""
        step = PagedStep(self._ops, kv, batch.attention, self.spec.windows)
        output = self._decode(token_ids_T, batch.positions_T, step, self._mask)
        hidden: Tensor = output.last_hidden_state
        return batch.wanted(hidden[0])

    def logits(self, hidden_SE: Tensor) -> Tensor:
        """[S, V], with the architecture's scaling and soft cap."""
        logits: Tensor = self._head(inputs_embeds=hidden_SE[None], use_cache=False, return_dict=True).logits
        return logits[0]

    def _probe(self, token_ids: Sequence[int], probe: Probe, mask: Tensor) -> Any:
        token_ids_T = torch.tensor(token_ids, device=self._mask.device)
        return self._decode(token_ids_T, torch.arange(len(token_ids), device=self._mask.device), probe, mask)

    def _decode(self, token_ids_T: Tensor, positions_T: Tensor, step: Step, mask: Tensor) -> Any:
        return self._decoder(
            input_ids=token_ids_T[None],
            position_ids=positions_T[None],
            attention_mask=mask,
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
    AttentionInterface.register(ATTENTION, attend_in_cache)
    AttentionMaskInterface.register(ATTENTION, rule_mask)
    local = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    options = {"dtype": dtype, "attn_implementation": ATTENTION, "trust_remote_code": trust_remote_code}
    place = f"{checkpoint.path}: {architecture} does not run through transformers"
    with foreign(place, passing=(torch.OutOfMemoryError,)):
        config = AutoConfig.from_pretrained(checkpoint.path, **local)
        _check_class(config, architecture, trust_remote_code)
        if seed is None:
            check_size(AutoModelForCausalLM, config, options, checkpoint)
            model = read_model(AutoModelForCausalLM, checkpoint, options | local)
        else:
            model = random_model(AutoModelForCausalLM, config, options, RandomWeights(dtype, device, seed), device)
        return TransformersModel(model.to(device).eval(), architecture, ops)


def _check_class(config: Any, architecture: str, trust_remote_code: bool) -> None:
    """Refuse what transformers itself says cannot attend by interface, before any weight is read.

    transformers finds the class by the config's model_type. Its own name for it need not be the published one, which
    then is the model type's ("InternLM3ForCausalLM" is its LlamaForCausalLM).
    """
    model_class = getattr(transformers, architecture, None)
    published = config.model_type.replace("_", "").replace("-", "") + "forcausallm"
    if model_class is None and architecture.lower() == published:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None and not trust_remote_code:
        raise CheckpointError(f"{architecture}: neither aserve nor transformers {transformers.__version__} knows it")
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        raise CheckpointError(f"{architecture}: transformers does not attend by interface in it, so it cannot be paged")


def _find_decoder(model: Any) -> nn.Module:
    """What makes hidden states of token ids. (Some models' own get_decoder gives the model itself, or its head.)"""
    for found in (model.get_decoder(), model.base_model, getattr(model, "model", model)):
        if found is not model and any(isinstance(module, nn.Embedding) for module in found.modules()):
            return cast("nn.Module", found)
    raise refusal(model.config, "transformers has no decoder of it apart from its head")


def _replace(model: Any, given: nn.Module, new: nn.Module) -> Any:
    """The model with another module in place of one of its own."""
    path = next(name for name, module in model.named_modules() if module is given)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)
    return model


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

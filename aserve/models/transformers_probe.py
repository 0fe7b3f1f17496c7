"""What a model of transformers does to its layers, found out by running it: shapes, windows, masks.

Nothing is read from the config that running can tell. Three runs, in all of which attention answers with zeros:

  as it is served    one token with a mask of ours: how each layer calls attention, and that the mask arrives untouched
  left to itself     one token with generation's mask of tokens: the rule by which the model itself then masks each
                     layer. It is evaluated at positions all over the context; attention knows causal windows alone
  in company         two tokens, one of them exchanged: the other must come out the same, for layers that mix tokens
                     beside attention (convolutions, states, token shifts) keep something that the cache does not hold

A model that fails one of them is refused, in one line. Shape letters: kernels/ops.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from aserve.core.errors import CheckpointError
from aserve.core.layout import Window
from aserve.models.spec import FULL, SLIDING

HARMLESS: Final = frozenset(
    {"dropout", "is_causal", "position_ids", "use_cache", "cache_position", "output_attentions", "output_router_logits"}
)
"""Keyword arguments of attention that change nothing here. Any other that is set would be ignored, so it is refused."""

MAX_ROW: Final = 2**20
"""Positions of a mask that are looked at."""


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


class RuleMask(Tensor):
    """A mask that says by which rule it was made. What is derived from it is of this class too, and has no rule."""

    rule: Callable[..., Tensor] | None = None
    use_vmap: bool = False


def rule_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> RuleMask:
    """transformers' mask function. Called in a probe alone: in service the batch says what each token may see."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device).as_subclass(RuleMask)
    mask.rule, mask.use_vmap = mask_function, use_vmap
    return mask


@dataclass(frozen=True, slots=True)
class Probe:
    """A step that notes each layer's call and the shapes of its q, k and v."""

    calls: list[LayerCall] = field(default_factory=list)
    shapes: list[tuple[torch.Size, torch.Size, torch.Size]] = field(default_factory=list)

    def attend(self, call: LayerCall, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Zeros, of the size of the values."""
        self.calls.append(call)
        self.shapes.append((q_THD.shape, k_TKD.shape, v_TKD.shape))
        return q_THD.new_zeros(*q_THD.shape[:-1], v_TKD.shape[-1])


def check_calls(config: Any, probe: Probe) -> None:
    """Raise `CheckpointError` unless each layer attended once, causally, and in the way that the cache is laid out."""
    layers = [call.layer for call in probe.calls]
    if layers != list(range(config.num_hidden_layers)):
        if len(layers) == config.num_hidden_layers:
            raise refusal(config, "its layers run several times, or in another order than their numbers")
        raise refusal(config, f"of {config.num_hidden_layers} layers {len(layers)} attend by transformers' interface")
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "num_kv_shared_layers", 0):
        raise refusal(config, "its layers share keys and values")
    shapes = sorted({(q[1], k[1], k[2], v[2]) for q, k, v in probe.shapes})
    if len(shapes) > 1:
        raise refusal(
            config, f"its heads differ in size or number: {_heads(shapes[0])} here, {_heads(shapes[1])} there"
        )
    if not all(call.causal for call in probe.calls):
        raise refusal(config, "its attention is not causal")
    if any(call.mask is not None and (call.mask.numel(), call.mask.dtype) != (1, torch.bool) for call in probe.calls):
        raise refusal(config, "it makes an attention mask of its own")
    given = [item for call in probe.calls for item in call.others.items()]
    extra = sorted({name for name, value in given if value is not None and value is not False} - HARMLESS)
    if extra:
        raise refusal(config, f"its attention has {', '.join(extra)}")


def read_windows(config: Any, served: Probe, alone: Probe, context_len: int) -> tuple[Window, ...]:
    """The sliding window of each layer, as both its mask and its call have it.

    Raises `CheckpointError` where they differ, or a mask is no causal window.
    """
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        kinds = [SLIDING if getattr(config, "sliding_window", None) else FULL] * len(served.calls)
    if not len(kinds) >= len(served.calls) == len(alone.calls):
        raise refusal(config, f"layer_types names {len(kinds)} layers, of which {len(served.calls)} attend")
    for layer, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING):
            raise refusal(config, f"layer {layer} has {kind}, and its mask is not known to attention")
    rules = {id(call.mask): call.mask for call in alone.calls if call.mask is not None}  # most layers share one
    found = {key: _window_of(config, mask, context_len) for key, mask in rules.items()}
    windows = []
    for kind, call, lonely in zip(kinds, served.calls, alone.calls, strict=False):
        where = f"layer {call.layer} has {kind}"
        passed = None if call.window is None or call.window >= context_len else call.window
        masked = found.get(id(lonely.mask), passed)
        if passed is not None and passed != masked:
            raise refusal(config, f"{where}: it asks attention for a window of {passed}, its mask has {masked}")
        if kind == SLIDING and masked is None and _is_short(config, context_len):
            raise refusal(
                config,
                f"{where}, but neither its mask nor its call has the window, which generation's cache would have",
            )
        windows.append(masked)
    return tuple(windows)


def check_company(config: Any, decode: Callable[[Sequence[int], Probe], Tensor]) -> None:
    """Raise `CheckpointError` if a token's hidden state depends on another one although attention answers with zeros.

    decode: token ids to hidden states, [T, E]. A product's rounding may depend on the number of rows that an expert
    gets, so that equality is up to that.
    """
    first, second, other = (decode(tokens, Probe()) for tokens in ([0, 1], [0, 2], [2, 1]))
    tolerance = 1e-3 if first.dtype == torch.float32 else 0.05
    for one, same in ((first[0], second[0]), (first[1], other[1])):
        if (one - same).abs().max() > tolerance * one.abs().max():
            raise refusal(config, "its layers mix tokens beside attention, and the cache does not hold what they keep")


def refusal(config: Any, reason: str) -> CheckpointError:
    """The error of a model that cannot be served, for this reason."""
    return CheckpointError(f"{config.model_type} cannot run over a paged cache: {reason}")


def _window_of(config: Any, mask: Tensor, context_len: int) -> Window:
    """The causal window that a mask's rule is. Raises `CheckpointError` for any other rule."""
    if not isinstance(mask, RuleMask) or mask.rule is None:
        raise refusal(config, "it makes an attention mask of its own")
    length = min(context_len, MAX_ROW)

    def sees(position: int) -> Tensor:
        row: Tensor
        [[[row]]] = sdpa_mask(
            batch_size=1,
            q_length=1,
            kv_length=length,
            q_offset=position,
            mask_function=mask.rule,
            allow_is_causal_skip=False,
            use_vmap=mask.use_vmap,
            device=mask.device,
        )
        return row

    window = int(sees(length - 1).sum())
    keys = torch.arange(length, device=mask.device)
    edges = (0, 1, window - 1, window, window + 1, 2 * window - 1)
    for position in {*edges, length // 3, length // 2, length - 2, length - 1}:
        if 0 <= position < length:
            row = sees(position)
            if row[position + 1 :].any():
                raise refusal(config, "its attention is not causal: its mask shows tokens that come later")
            if not torch.equal(row, (keys <= position) & (keys > position - window)):
                raise refusal(config, "its mask is neither causal nor a sliding window")
    return None if window == length else window


def _is_short(config: Any, context_len: int) -> bool:
    window = getattr(config, "sliding_window", None)
    return isinstance(window, int) and window < context_len


def _heads(shape: tuple[int, int, int, int]) -> str:
    num_heads, num_kv_heads, key_dim, value_dim = shape
    return f"{num_heads} queries, {num_kv_heads} keys of {key_dim}, values of {value_dim}"

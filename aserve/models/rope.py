"""Rotary position embedding as a table: cosines and sines of every position, float32, computed once.

A pair (i, i + D/2) of a head turns by the angle position * f_i (RoFormer, arXiv 2104.09864). The kinds differ in the
frequencies f_i and, yarn alone, in a factor on the result. With t the theta, s the factor, n the original length:

  default   f_i = t^(-2i/D)
  linear    f_i / s: position interpolation (arXiv 2306.15595)
  dynamic   t grows with the length l: t * (s * l/n - (s - 1))^(D/(D-2)): NTK-aware scaling
  llama3    low frequencies / s, high ones as they are, a ramp between (Llama 3.1)
  yarn      the same idea, ramped over i, and cos, sin * (0.1 ln s + 1) (arXiv 2309.00071)

Dynamic scaling depends on "the length", and transformers' `generate` takes the length at the time: a prompt beyond n
is rotated by its own length, each generated token by the length it makes. Here position p takes max(n, p + 1), so the
table is a function of the position alone, and chunking, prefix reuse and preemption cannot change an answer. The two
agree within n, and beyond it whenever the prompt fits n.
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from aserve.models.spec import RopeSpec

POSITIONS_AT_ONCE: Final = 2**16
"""What is computed on the way to a long table takes little beside it."""


def rope_table(spec: RopeSpec, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """[L, D] float32: cosines in [:, :D/2], sines in [:, D/2:], for positions 0 to L - 1."""
    table_LD = torch.empty(num_positions, head_dim, dtype=torch.float32, device=device)
    scale = _yarn_scale(spec) if spec.kind == "yarn" else 1.0
    for start in range(0, num_positions, POSITIONS_AT_ONCE):
        positions_P = torch.arange(
            start, min(start + POSITIONS_AT_ONCE, num_positions), dtype=torch.float32, device=device
        )
        angles_PD2 = positions_P[:, None] * FREQUENCIES[spec.kind](spec, head_dim, positions_P)
        rows = slice(start, start + POSITIONS_AT_ONCE)
        torch.cat((angles_PD2.cos() * scale, angles_PD2.sin() * scale), dim=-1, out=table_LD[rows])
    return table_LD


def _exponents(head_dim: int, device: torch.device) -> Tensor:
    """2i/D, [D/2]."""
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim


def _default(spec: RopeSpec, head_dim: int, positions_L: Tensor) -> Tensor:
    return 1.0 / spec.theta ** _exponents(head_dim, positions_L.device)


def _linear(spec: RopeSpec, head_dim: int, positions_L: Tensor) -> Tensor:
    return _default(spec, head_dim, positions_L) / spec.parameters["factor"]


def _dynamic(spec: RopeSpec, head_dim: int, positions_L: Tensor) -> Tensor:
    """Frequencies per position, [L, D/2]."""
    factor, original = spec.parameters["factor"], spec.parameters["original_max_position_embeddings"]
    length_L = (positions_L + 1).clamp(min=original)
    theta_L = spec.theta * (factor * length_L / original - (factor - 1)) ** (head_dim / (head_dim - 2))
    return 1.0 / theta_L[:, None] ** _exponents(head_dim, positions_L.device)


def _llama3(spec: RopeSpec, head_dim: int, positions_L: Tensor) -> Tensor:
    """Source: meta-llama/llama-models, apply_scaling. `turns` is how often a pair turns within the original length."""
    factor, original = spec.parameters["factor"], spec.parameters["original_max_position_embeddings"]
    low, high = spec.parameters["low_freq_factor"], spec.parameters["high_freq_factor"]
    kept = _default(spec, head_dim, positions_L)
    turns = original * kept / (2 * math.pi)
    share_kept = ((turns - low) / (high - low)).clamp(0, 1)
    return share_kept * kept + (1 - share_kept) * kept / factor


def _yarn(spec: RopeSpec, head_dim: int, positions_L: Tensor) -> Tensor:
    """NTK-by-parts: pairs that turn more than beta_fast times within the original length keep their frequency."""
    parameters = spec.parameters

    def pair_turning(num_turns: float) -> float:
        """The index i, as a real number, of the pair that turns so often within the original length."""
        wavelength = parameters["original_max_position_embeddings"] / num_turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(spec.theta))

    low = pair_turning(parameters.get("beta_fast", 32.0))
    high = pair_turning(parameters.get("beta_slow", 1.0))
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    kept = _default(spec, head_dim, positions_L)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=positions_L.device)
    share_scaled = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
    return (1 - share_scaled) * kept + share_scaled * kept / parameters["factor"]


def _yarn_scale(spec: RopeSpec) -> float:
    """The factor on cosines and sines, which makes up for attention's entropy growing with the length."""
    parameters = spec.parameters

    def attention_scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(max(parameters["factor"], 1.0)) + 1.0

    if "attention_factor" in parameters:
        return parameters["attention_factor"]
    if "mscale" in parameters and "mscale_all_dim" in parameters:
        return attention_scale(parameters["mscale"]) / attention_scale(parameters["mscale_all_dim"])
    return attention_scale(1.0)


FREQUENCIES: Final[dict[str, Callable[[RopeSpec, int, Tensor], Tensor]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""Radians a position, [D/2] or, where they depend on the position, [L, D/2]."""

"""The quantizations of weights that there are, and where: known without a model, and without torch."""

from collections.abc import Mapping
from typing import Final

import msgspec


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """How linear layers keep their weights. device: the kind that multiplies them so. dtypes: what rows may be.

    group: inputs that share a scale; 0 for all of an output's. keeps_head: the output head stays as it is.
    """

    device: str
    dtypes: tuple[str, ...]
    group: int = 0
    keeps_head: bool = False


_OF_INT8: Final = ("float32", "bfloat16")
QUANTIZATIONS: Final[Mapping[str, Quantization]] = {
    "int8": Quantization(device="cpu", dtypes=_OF_INT8),
    "int8-g128": Quantization(device="cpu", dtypes=_OF_INT8, group=128),
    "int8-g32": Quantization(device="cpu", dtypes=_OF_INT8, group=32),
    "fp8": Quantization(device="cuda", dtypes=("bfloat16", "float16"), keeps_head=True),
}
_ELSEWHERE: Final = {
    "cpu": "there is none but on a CPU; choose fp8, or --device cpu",
    "cuda": "there is none but on a GPU; choose int8 on a CPU",
}


def why_not(quantization: str, *, architecture: str, is_native: bool, device: str, dtype: str) -> str | None:
    """Why a model cannot be kept so, in a line that begins with the quantization; None where nothing is known."""
    wanted = QUANTIZATIONS[quantization]
    if not is_native:
        return f"quantization {quantization} is not for {architecture}: it runs through transformers"
    if device != wanted.device:
        return f"quantization {quantization}: {_ELSEWHERE[wanted.device]}"
    if dtype not in wanted.dtypes:
        allowed = " or ".join(wanted.dtypes)
        return f"quantization {quantization}: dtype is {dtype}, and has to be {allowed}; choose with --dtype"
    return None

"""The quantizations of weights, and the types of keys and values, that there are, and where: known without a model, and
without torch.
"""

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
CACHE_DTYPES: Final[Mapping[str, str]] = {"bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}
"""Types of keys and values other than the model's, and what torch calls them."""
KV_CACHE_DTYPES: Final = ("auto", *CACHE_DTYPES)
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


def cache_dtype_name(wish: str, dtype: str) -> str:
    """Of keys and values, as torch calls it: what is wished, or for auto the model's."""
    return CACHE_DTYPES.get(wish, dtype)


def why_no_cache(wish: str, device: str) -> str | None:
    """Why keys and values cannot be kept so on a kind of device, in a line; None where nothing is known."""
    if wish == "fp8" and device == "cpu":
        return "kv_cache_dtype fp8: there is none but on a GPU; choose bfloat16 on a CPU"
    return None

"""Checkpoints whose linear layers are quantized: the formats that are read, and the tensors that make up a weight.

Of a layer P with I inputs and O outputs, of b bits, n = 32 / b numbers in each word of 32 bits, G groups of inputs:

    gptq                 P.qweight [I / n, O]   P.qzeros [G, O / n]   P.scales [G, O]   P.g_idx [I]
    awq                  P.qweight [I, O / n]   P.qzeros [G, O / n]   P.scales [G, O]
    compressed-tensors   P.weight_packed [O, I / n]   P.weight_zero_point [O / n, G]   P.weight_scale [O, G]
                         P.weight_g_idx [I]
                         or P.weight [O, I] of int8 or float8, P.weight_zero_point and P.weight_scale by blocks
    fp8, fbgemm_fp8      P.weight [O, I] of float8   P.weight_scale or P.weight_scale_inv by blocks

A weight is (number - zero point) * scale. Activations are never quantized because a checkpoint says so: what it has for
that is left. Reads headers alone, without torch; dequantize.py reads the tensors. Frantar et al., "GPTQ" (2022), Lin et
al., "AWQ" (2023), as AutoGPTQ and AutoAWQ save them; the compressed-tensors of vLLM's; DeepSeek's blocks of float8.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from aserve.core.errors import CheckpointError
from aserve.models.headers import TensorHeader
from aserve.models.spec import ConfigReader

FLOAT8: Final = "F8_E4M3"
_SCALES: Final = ("F32", "F16", "BF16", "F8_E8M0")
_MAIN: Final = {"gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "plain": "weight"}
"""The tensor that has a layer's numbers, by layout."""
_UNUSED: Final = (
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".output_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".weight_shape"),
)
"""Ends of names of what is for quantized activations, keys and values, or is known anyway."""
_METHODS: Final = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8")
_PACKED_BITS: Final = (2, 4, 8)


class QuantizedFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint keeps the weights of linear layers.

    method: as its config calls it. layout: of `_MAIN`. bits: of a number. block: outputs and inputs that share a scale,
    0 for all of them. zero_points_less_one: they are stored less by one.
    """

    method: str
    layout: str
    bits: int = 8
    block: tuple[int, int] = (1, 0)
    zero_points_less_one: bool = False

    def __str__(self) -> str:
        return f"{self.method}, {self.bits} bits"


class QuantizedWeight(msgspec.Struct, frozen=True, kw_only=True):
    """One weight. shape: its outputs and inputs. share: how many outputs and inputs have a scale together.

    tensors: names in the checkpoint by what they are: weight, scale, and perhaps zero_point and group (of each input).
    """

    format: QuantizedFormat
    shape: tuple[int, int]
    share: tuple[int, int]
    tensors: Mapping[str, str]


def read_format(config: Mapping[str, Any]) -> QuantizedFormat | None:
    """What a config says; None where weights are as they are. `CheckpointError`, naming it, for what is not read."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: quantization_config must be an object, got {repr(given)[:80]}")
    read = ConfigReader(given, "quantization_config.")
    method = read.text("quant_method", "compressed-tensors" if "config_groups" in given else "")
    if method not in _METHODS:
        raise _refusal("quant_method", method, _METHODS)
    return {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}.get(method, _float8)(given, read)


def _refusal(key: str, given: object, allowed: tuple[object, ...]) -> CheckpointError:
    listed = ", ".join(str(value) for value in allowed)
    return CheckpointError(
        f"config.json: quantization_config.{key} {repr(given)[:80]} is not read; these are: {listed}"
    )


def _packed_bits(read: ConfigReader, key: str) -> int:
    bits = read.integer(key)
    if bits not in _PACKED_BITS:
        raise _refusal(key, bits, _PACKED_BITS)
    return bits


def _group_size(read: ConfigReader, key: str) -> int:
    """0 for -1, by which all inputs are meant."""
    size = read.integer(key, -1, minimum=-1)
    if size == 0:
        raise CheckpointError(f"config.json: quantization_config.{key} must be -1 or positive, got 0")
    return max(size, 0)


def _gptq(given: Mapping[str, Any], read: ConfigReader) -> QuantizedFormat:
    versions = ("gptq", "gptq_v2")
    version = read.text("checkpoint_format", "gptq")
    if version not in versions:
        raise _refusal("checkpoint_format", version, versions)
    return QuantizedFormat(
        method="gptq",
        layout="gptq",
        bits=_packed_bits(read, "bits"),
        block=(1, _group_size(read, "group_size")),
        zero_points_less_one=version == "gptq",
    )


def _awq(given: Mapping[str, Any], read: ConfigReader) -> QuantizedFormat:
    key = "format" if "format" in given else "version"
    version = read.text(key, "gemm").lower()
    if version != "gemm":
        raise _refusal(key, version, ("gemm",))
    if not read.flag("zero_point", default=True):
        raise _refusal("zero_point", False, (True,))
    key = "bits" if "bits" in given else "w_bit"
    bits = _packed_bits(read, key)
    if bits != 4:
        raise _refusal(key, bits, (4,))
    size_key = "group_size" if "group_size" in given else "q_group_size"
    return QuantizedFormat(method="awq", layout="awq", bits=bits, block=(1, _group_size(read, size_key)))


def _float8(given: Mapping[str, Any], read: ConfigReader) -> QuantizedFormat:
    block = given.get("weight_block_size")
    return QuantizedFormat(
        method=read.text("quant_method", ""),
        layout="plain",
        block=(1, 0) if block is None else _block(block, "weight_block_size"),
    )


def _block(given: object, key: str) -> tuple[int, int]:
    sizes = given if isinstance(given, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(
            f"config.json: quantization_config.{key} must be two positive integers, got {repr(given)[:80]}"
        )
    return sizes[0], sizes[1]


def _compressed_tensors(given: Mapping[str, Any], read: ConfigReader) -> QuantizedFormat:
    formats = {
        "pack-quantized": "packed",
        "int-quantized": "plain",
        "float-quantized": "plain",
        "naive-quantized": "plain",
    }
    if given.get("transform_config"):
        raise CheckpointError(
            "config.json: quantization_config.transform_config is not read: activations would be turned"
        )
    sparsity = given.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise CheckpointError("config.json: quantization_config.sparsity_config is not read: leave weights dense")
    found = {_of_group(name, group, read.text("format", "pack-quantized")) for name, group in _groups(given)}
    if len(found) != 1:
        raise CheckpointError(
            f"config.json: quantization_config.config_groups must have weights of one kind, found {len(found)}"
        )
    name, bits, kind, block = found.pop()
    if name not in formats:
        raise _refusal("format", name, tuple(formats))
    layout = formats[name]
    is_read = kind == "int" and bits in _PACKED_BITS if layout == "packed" else bits == 8
    if not is_read:
        raise CheckpointError(f"config.json: quantization_config: {name} of {kind}, {bits} bits, is not read")
    return QuantizedFormat(method="compressed-tensors", layout=layout, bits=bits, block=block)


def _groups(given: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(
            f"config.json: quantization_config.config_groups must be objects by name, got {repr(groups)[:80]}"
        )
    yield from groups.items()


def _of_group(name: str, group: Mapping[str, Any], whole_format: str) -> tuple[str, int, str, tuple[int, int]]:
    """Format, bits, type and block of a group's weights."""
    place = f"config_groups.{name}.weights"
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise CheckpointError(f"config.json: quantization_config.{place} must be an object, got {repr(weights)[:80]}")
    read = ConfigReader(weights, f"quantization_config.{place}.")
    strategy = read.text("strategy", "tensor")
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, 0), "block": (0, 0)}
    if strategy not in blocks:
        raise _refusal(f"{place}.strategy", strategy, tuple(blocks))
    block = blocks[strategy]
    if strategy == "group":
        block = (1, read.integer("group_size"))
    elif strategy == "block":
        block = _block(weights.get("block_structure"), f"{place}.block_structure")
    return (
        ConfigReader(group, f"quantization_config.config_groups.{name}.").text("format", whole_format),
        read.integer("num_bits"),
        read.text("type", "int"),
        block,
    )


def quantized_weights(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> dict[str, QuantizedWeight]:
    """Those of a checkpoint, by the names that a model has for them.

    Raises as `read_format`, and `CheckpointError`, naming the tensor, where one is missing or not as the format says.
    """
    format = read_format(config)
    if format is None:
        return {}
    end = f".{_MAIN[format.layout]}"
    found = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(end)
        if layer != name and (format.layout != "plain" or tensor.dtype in ("I8", FLOAT8)):
            found[f"{layer}.weight"] = _Layer(format, layer, tensors).weight()
    return found


def as_served(tensors: Mapping[str, TensorHeader], weights: Mapping[str, QuantizedWeight]) -> dict[str, TensorHeader]:
    """Of a checkpoint's tensors those that a model asks for: in place of a quantized weight's, the weight itself."""
    if not weights:
        return dict(tensors)
    parts = {name for weight in weights.values() for name in weight.tensors.values()}
    rest = {name: tensor for name, tensor in tensors.items() if name not in parts and not is_unused(name)}
    # What it takes in the file is told by no one of its tensors.
    made_up = {name: TensorHeader("F32", weight.shape, (0, 0)) for name, weight in weights.items()}
    return rest | made_up


def biases_of(weights: Mapping[str, QuantizedWeight]) -> frozenset[str]:
    """Biases that some tools write where a layer has none: zeros, if so."""
    return frozenset(f"{name.removesuffix('weight')}bias" for name in weights)


def is_unused(name: str) -> bool:
    """Whether a checkpoint of quantized weights has a tensor for what is not done here, or known without it."""
    return name.endswith(_UNUSED)


class _Layer:
    """The tensors of one layer, checked as they are asked for."""

    def __init__(self, format: QuantizedFormat, layer: str, tensors: Mapping[str, TensorHeader]) -> None:
        self._format = format
        self._layer = layer
        self._tensors = tensors
        self._found: dict[str, str] = {}

    def weight(self) -> QuantizedWeight:
        layout = self._format.layout
        shape = self._take("weight", _MAIN[layout], (FLOAT8, "I8") if layout == "plain" else ("I32",)).shape
        if len(shape) != 2:
            raise self._refusal(_MAIN[layout], f"has {len(shape)} dimensions, not 2")
        num_outputs, num_inputs, share = getattr(self, f"_{layout}")(*shape)
        return QuantizedWeight(format=self._format, shape=(num_outputs, num_inputs), share=share, tensors=self._found)

    def _gptq(self, num_words: int, num_outputs: int) -> tuple[int, int, tuple[int, int]]:
        return self._with_zero_points(num_outputs, num_words * self._in_word, "g_idx")

    def _awq(self, num_inputs: int, num_words: int) -> tuple[int, int, tuple[int, int]]:
        return self._with_zero_points(num_words * self._in_word, num_inputs)

    def _with_zero_points(
        self, num_outputs: int, num_inputs: int, group_name: str | None = None
    ) -> tuple[int, int, tuple[int, int]]:
        group = self._format.block[1] or max(num_inputs, 1)
        num_groups = -(-num_inputs // group)
        self._take("scale", "scales", _SCALES, (num_groups, num_outputs))
        self._take("zero_point", "qzeros", ("I32",), (num_groups, -(-num_outputs // self._in_word)))
        if group_name is not None:
            self._take("group", group_name, ("I32",), (num_inputs,), required=False)
        return num_outputs, num_inputs, (1, group)

    def _packed(self, num_outputs: int, num_words: int) -> tuple[int, int, tuple[int, int]]:
        num_inputs = num_words * self._in_word
        group = self._format.block[1] or max(num_inputs, 1)
        num_groups = -(-num_inputs // group)
        scale = self._take("scale", "weight_scale", _SCALES)
        if scale.shape != (num_outputs, num_groups):
            raise self._refusal("weight_scale", f"is {list(scale.shape)}, not {[num_outputs, num_groups]}")
        zero_points = (-(-num_outputs // self._in_word), num_groups)
        self._take("zero_point", "weight_zero_point", ("I32",), zero_points, required=False)
        self._take("group", "weight_g_idx", ("I32", "I64"), (num_inputs,), required=False)
        return num_outputs, num_inputs, (1, group)

    def _plain(self, num_outputs: int, num_inputs: int) -> tuple[int, int, tuple[int, int]]:
        # DeepSeek's tools call it the inverse, and multiply by it all the same.
        inverse = "weight_scale_inv"
        name = inverse if f"{self._layer}.{inverse}" in self._tensors else "weight_scale"
        scale = self._take("scale", name, _SCALES)
        self._take("zero_point", "weight_zero_point", ("I8",), scale.shape, required=False)
        rows, columns = (*scale.shape, 1, 1)[:2]
        outputs, inputs = self._share(num_outputs, rows, 0), self._share(num_inputs, columns, 1)
        if len(scale.shape) > 2 or outputs is None or inputs is None:
            block = [size or "all" for size in self._format.block]
            raise self._refusal(
                name, f"is {list(scale.shape)}, which are no scales of {[num_outputs, num_inputs]} by {block}"
            )
        return num_outputs, num_inputs, (outputs, inputs)

    def _share(self, size: int, num_scales: int, dim: int) -> int | None:
        """How many of a dimension have a scale together; None where so many scales are not for that."""
        for share in (max(size, 1), 1, self._format.block[dim]):
            if share and num_scales == -(-size // share):
                return share
        return None

    @property
    def _in_word(self) -> int:
        return 32 // self._format.bits

    def _take(
        self,
        what: str,
        end: str,
        dtypes: tuple[str, ...],
        shape: tuple[int, ...] | None = None,
        *,
        required: bool = True,
    ) -> TensorHeader:
        found = self._tensors.get(f"{self._layer}.{end}")
        if found is None:
            if required:
                raise self._refusal(end, f"is missing, which {self._format.method} has")
            return TensorHeader("", (), (0, 0))
        if found.dtype not in dtypes:
            raise self._refusal(end, f"has dtype {found.dtype}, not one of {', '.join(dtypes)}")
        if shape is not None and found.shape != shape:
            raise self._refusal(end, f"is {list(found.shape)}, but {self._format} asks for {list(shape)}")
        self._found[what] = f"{self._layer}.{end}"
        return found

    def _refusal(self, end: str, reason: str) -> CheckpointError:
        return CheckpointError(f"tensor {self._layer}.{end} {reason}")

"""ModelSpec: the numbers of a decoder, read from a Hugging Face config.json. Pure: no torch, no file, no transformers.

Knows the native families' spellings and defaults, old (`rope_scaling`, `rope_theta`) and new (`rope_parameters`,
transformers 5). A new family is an entry in FAMILIES and the file that its entry names. Other architectures are
measured where transformers runs them (transformers_backend.py).
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from aserve.core.errors import CheckpointError

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
DTYPE_BYTES: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of a number, by the types that models are served in."""
CACHE_DTYPE_BYTES: Final[Mapping[str, int]] = {**DTYPE_BYTES, "float8_e4m3fn": 1}
"""Likewise, by the types that keys and values are kept in."""


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding. kind: default, linear, dynamic, llama3 or yarn; parameters as the config names them.

    linear, dynamic: factor.  llama3: factor, low_freq_factor, high_freq_factor.
    yarn: factor, and any of attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate (0.0 or 1.0).
    All but default and linear also have original_max_position_embeddings.
    """

    kind: str
    theta: float
    parameters: dict[str, float] = {}


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a decoder. windows: per layer, the sliding window in tokens, or None for full attention.

    qkv_bias, out_bias: of the attention's projections. intermediate_size and norm_eps are 0 where transformers computes
    the model: only aserve's own formulas need them. has_head: it makes logits; one that pools has no use for them.
    num_ranks: processes that share the model; where there are several, heads and intermediate_size are those of one.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_len: int
    norm_eps: float
    windows: tuple[int | None, ...]
    rope: RopeSpec | None
    tie_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    has_head: bool = True
    num_ranks: int = 1

    @property
    def vocab_share(self) -> int:
        """Rows of the embedding table, and of the head, that a rank has: whole vectors of a CPU, the last of them zeros
        where the vocabulary does not come to as many.
        """
        return self.vocab_size if self.num_ranks == 1 else -(-self.vocab_size // (16 * self.num_ranks)) * 16

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes that one token's keys and values take over all layers."""
        return self.num_layers * self.kv_bytes_per_layer(dtype_bytes)

    def kv_bytes_per_layer(self, dtype_bytes: int) -> int:
        """Bytes that one token's keys and values take in a layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype_bytes

    @property
    def flops_per_token(self) -> int:
        """Two for each weight of the layers' matrices, taken to be of Llama's shape, and of the head."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        per_layer = self.hidden_size * (heads * self.head_dim + 3 * self.intermediate_size)
        return 2 * (self.num_layers * per_layer + self.vocab_share * self.hidden_size)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """An architecture that aserve computes by its own formula, and what its config leaves unsaid.

    model: module and class or function in aserve/models that makes it, named so that torch is loaded by need alone.
    sliding_window: the default where the key is absent.

    switched_windows: windows hold only with use_sliding_window, and from layer max_window_layers on (Qwen).
    qkv_bias None: attention_bias says, for the output projection too. mlp_bias: the config may ask for it.
    """

    model: str
    head_dim: int | None = None
    sliding_window: int | None = None
    switched_windows: bool = False
    qkv_bias: bool | None = None
    qk_norm: bool = False
    mlp_bias: bool = False
    context_len: int


FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": Family(model="llama:Llama", mlp_bias=True, context_len=2048),
    "MistralForCausalLM": Family(model="llama:Llama", sliding_window=4096, qkv_bias=False, context_len=131072),
    "Qwen2ForCausalLM": Family(
        model="llama:Llama", sliding_window=4096, switched_windows=True, qkv_bias=True, context_len=32768
    ),
    "Qwen3ForCausalLM": Family(
        model="qwen3:qwen3",
        head_dim=128,
        sliding_window=4096,
        switched_windows=True,
        qk_norm=True,
        context_len=32768,
    ),
}
"""By the name in a config's `architectures`. Every other architecture runs through transformers_backend.py."""


class ConfigReader:
    """Typed reading of a config dict; every complaint is one line that names the key."""

    def __init__(self, config: Mapping[str, Any], prefix: str = "") -> None:
        self._config = config
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """The integer at key; absent or null is the default, and without one an error."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._complaint(key, f"must be an integer of at least {minimum}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The positive, finite number at key."""
        value = self._given(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._complaint(key, "must be a positive number", value)
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean at key."""
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self._complaint(key, "must be true or false", value)
        return value

    def text(self, key: str, default: str) -> str:
        """The string at key."""
        value = self._given(key, default)
        if not isinstance(value, str):
            raise self._complaint(key, "must be a string", value)
        return value

    def _given(self, key: str, default: Any) -> Any:
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"config.json: {self._prefix}{key} is missing")
        return value

    def _complaint(self, key: str, rule: str, value: object) -> CheckpointError:
        return CheckpointError(f"config.json: {self._prefix}{key} {rule}, got {repr(value)[:80]}")


def read_architecture(config: Mapping[str, Any]) -> str:
    """The one class name in `architectures`. Raises `CheckpointError` where there is none."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError("config.json: architectures must name the model's class; this is not a language model")
    return names[0]


def dtype_name(config: Mapping[str, Any], wish: str) -> str:
    """Of weights and activations: the wish, or for auto the config's, or float32 where it names none.

    Raises `CheckpointError` for a type that is not served.
    """
    name = wish if wish != "auto" else config.get("dtype") or config.get("torch_dtype") or "float32"
    found = str(name).removeprefix("torch.")
    if found not in DTYPE_BYTES:
        raise CheckpointError(
            f"config.json: dtype {str(name)[:40]!r} is not one of {', '.join(DTYPE_BYTES)}; choose with --dtype"
        )
    return found


def read_eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> frozenset[int]:
    """Token ids that end an answer: the generation config's where it has any, else the config's."""
    for source, values in (("generation_config.json", generation_config), ("config.json", config)):
        value = values.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(f"{source}: eos_token_id must be a token id or a list of them, got {value!r}")
        if ids:
            return frozenset(ids)
    return frozenset()


def read_spec(config: Mapping[str, Any], *, has_head: bool = True) -> ModelSpec:
    """The spec of a native family's config (a key of FAMILIES). has_head: whether logits are wanted.

    Raises `CheckpointError` naming the key at fault.
    """
    architecture = read_architecture(config)
    family = FAMILIES[architecture]
    read = ConfigReader(config)
    if read.text("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only 'silu'")

    hidden_size = read.integer("hidden_size")
    num_layers = read.integer("num_hidden_layers")
    num_heads = read.integer("num_attention_heads")
    num_kv_heads = read.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = read.integer("head_dim", family.head_dim or max(1, hidden_size // num_heads), minimum=2)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim must be even for rotary embeddings, got {head_dim}")
    trained_len = read.integer("max_position_embeddings", family.context_len)
    rope = read_rope(config, trained_len, head_dim)
    attention_bias = read.flag("attention_bias", default=False) if family.qkv_bias is None else False
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=read.integer("intermediate_size"),
        vocab_size=read.integer("vocab_size"),
        context_len=_context_len(rope, trained_len),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        windows=_read_windows(config, family, num_layers),
        rope=rope,
        tie_embeddings=read.flag("tie_word_embeddings", default=False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias,
        mlp_bias=family.mlp_bias and read.flag("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        has_head=has_head,
    )


def read_rope(config: Mapping[str, Any], trained_len: int, head_dim: int) -> RopeSpec:
    """The rotary embedding, in whichever spelling. trained_len: the config's max_position_embeddings."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"config.json: {key} must be an object, got {repr(given)[:80]}")
    read = ConfigReader(given, f"{key}.")
    kind = read.text("rope_type", read.text("type", "default"))
    theta = read.number("rope_theta", ConfigReader(config).number("rope_theta", 10000.0))
    if any(ConfigReader(place).number("partial_rotary_factor", 1.0) != 1.0 for place in (given, config)):
        raise CheckpointError("config.json: partial_rotary_factor other than 1 is not supported for this architecture")
    if kind == "default":
        return RopeSpec(kind=kind, theta=theta)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise CheckpointError(f"config.json: {key} of type {kind!r} is not supported")

    original = read.integer("original_max_position_embeddings", trained_len)
    original = ConfigReader(config).integer("original_max_position_embeddings", original)
    if kind == "yarn":
        return RopeSpec(kind=kind, theta=theta, parameters=_yarn_parameters(read, given, trained_len, original))
    parameters = {"factor": read.number("factor")}
    if kind == "dynamic":
        if head_dim <= 2:
            raise CheckpointError("config.json: dynamic rope needs a head_dim over 2")
        parameters["original_max_position_embeddings"] = trained_len
    if kind == "llama3":
        parameters["original_max_position_embeddings"] = original
        parameters |= {name: read.number(name) for name in ("low_freq_factor", "high_freq_factor")}
        if parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
            raise CheckpointError(f"config.json: {key}.high_freq_factor must be over low_freq_factor")
    return RopeSpec(kind=kind, theta=theta, parameters=parameters)


def _yarn_parameters(read: ConfigReader, given: Mapping[str, Any], trained_len: int, original: int) -> dict[str, float]:
    parameters = {
        "factor": read.number("factor", trained_len / original),
        "original_max_position_embeddings": original,
        "truncate": float(read.flag("truncate", default=True)),
    }
    for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if given.get(name):
            parameters[name] = read.number(name)
    return parameters


def _context_len(rope: RopeSpec, trained_len: int) -> int:
    """Tokens the model can attend to, scaling included.

    llama3 configs, and yarn ones that say so, already count it in max_position_embeddings.
    """
    factor = rope.parameters.get("factor", 1.0)
    if rope.kind in ("linear", "dynamic"):
        return int(trained_len * factor)
    if rope.kind == "yarn":
        return max(trained_len, int(rope.parameters["original_max_position_embeddings"] * factor))
    return trained_len


def _read_windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.sliding_window is None:
        return (None,) * num_layers
    read = ConfigReader(config)
    if not family.switched_windows:
        # Mistral: null switches windows off, an absent key is the default.
        if config.get("sliding_window", family.sliding_window) is None:
            return (None,) * num_layers
        return (read.integer("sliding_window", family.sliding_window),) * num_layers

    layer_types = config.get("layer_types")
    if layer_types is None:
        switched = read.flag("use_sliding_window", default=False) and config.get("sliding_window", 0) is not None
        first = read.integer("max_window_layers", 28, minimum=0) if switched else num_layers
        layer_types = [SLIDING if i >= first else FULL for i in range(num_layers)]
    if not isinstance(layer_types, list) or len(layer_types) < num_layers:
        raise CheckpointError(f"config.json: layer_types must name all {num_layers} layers")
    unknown = [kind for kind in layer_types if kind not in (FULL, SLIDING)]
    if unknown:
        raise CheckpointError(f"config.json: layer_types {unknown[0]!r} is not supported for this architecture")
    if SLIDING not in layer_types:
        return (None,) * num_layers
    window = read.integer("sliding_window", family.sliding_window)
    return tuple(window if kind == SLIDING else None for kind in layer_types[:num_layers])

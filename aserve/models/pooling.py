"""What a folder says of pooling: whether its model pools at all, which hidden states, and what is done with them.

    config.json              architectures, num_labels, id2label, classifier_from_token, is_matryoshka, problem_type
    modules.json             sentence-transformers: Transformer, then Pooling, Dense and Normalize in some order
    1_Pooling/config.json    which hidden states
    2_Dense/config.json      a linear layer and what follows it; its weights are beside it

Pure but for reading those small files: no torch, no transformers. What it says is carried out by pooler_head.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from aserve.core.errors import CheckpointError, ConfigError
from aserve.core.pooling import Activation, ConvertKind, Pooling, PoolingMethod, PoolingTask, RunnerKind
from aserve.models.checkpoint import Checkpoint, read_object
from aserve.models.headers import read_header
from aserve.models.spec import FAMILIES, ConfigReader, read_architecture

MAX_LABELS: Final = 2**16
MODULES_FILE: Final = "modules.json"
ENCODERS: Final = frozenset(
    {"bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "mpnet", "modernbert"}
)
"""By model_type: what transformers computes on whole sequences, each position seeing all others."""
POOLING_SUFFIXES: Final[Mapping[str, PoolingTask]] = {
    "ForSequenceClassification": "classify",
    "ForMaskedLM": "embed",
    "RewardModel": "reward",
    "Model": "embed",
}
"""Ends of the names of architectures that generate nothing, with what they are for."""
METHODS: Final[Mapping[str, PoolingMethod]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
DENSE_ACTIVATIONS: Final = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid")


class DenseSpec(msgspec.Struct, frozen=True):
    """A linear layer of sentence-transformers behind the pooling. activation: a class of torch.nn by name."""

    folder: Path
    num_in: int
    num_out: int
    has_bias: bool
    activation: str


class PoolingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be loaded and done. size of `pooling`: 0 where that is the model's hidden size.

    family: the native family that computes the hidden states, None for an encoder or a decoder of transformers.
    has_head: the checkpoint classifies by a head of its own. token_names: it classifies by these tokens' logits.
    dense: layers behind the pooling. max_len: of an input, where the folder says less than the model could.
    """

    pooling: Pooling
    family: str | None
    has_head: bool = False
    token_names: tuple[str, ...] = ()
    dense: tuple[DenseSpec, ...] = ()
    max_len: int | None = None


class _Modules(msgspec.Struct, frozen=True):
    """What the modules of sentence-transformers say."""

    method: PoolingMethod
    normalizes: bool
    dense: tuple[DenseSpec, ...]


def base_family(architecture: str) -> str | None:
    """The native family whose layers an architecture has: of Qwen3Model, Qwen3ForCausalLM. None where there is none."""
    for suffix in ("ForCausalLM", "ForSequenceClassification", "RewardModel", "Model"):
        name = f"{architecture.removesuffix(suffix)}ForCausalLM"
        if architecture.endswith(suffix) and name in FAMILIES:
            return name
    return None


def read_pooling(
    checkpoint: Checkpoint, runner: RunnerKind = "auto", convert: ConvertKind = "auto"
) -> PoolingPlan | None:
    """How the folder's model pools; None for one that generates. Raises `ConfigError` for wishes that do not fit it,
    `CheckpointError` for a folder that asks for what is not supported."""
    config = checkpoint.config
    architecture = read_architecture(config)
    modules = _read_modules(checkpoint.path)
    own_task = next((task for end, task in POOLING_SUFFIXES.items() if architecture.endswith(end)), None)
    if architecture.endswith("LMHeadModel"):  # as GPT-2's is called
        own_task = None
    if own_task is not None and config.get("classifier_from_token"):
        own_task = "classify"
    asks = convert not in ("auto", "none")
    if runner == "auto":
        runner = "pooling" if own_task is not None or modules is not None or asks else "generate"
    if runner == "generate":
        _check_generates(architecture, own_task, convert)
        return None
    if convert == "none" and own_task is None:
        raise ConfigError(f"convert none: {architecture} generates text, and pools only when it is converted")
    task: PoolingTask = own_task or ("classify" if config.get("classifier_from_token") else "embed")
    if convert not in ("auto", "none"):
        task = convert  # type: ignore[assignment]  # the others are those of PoolingTask
    return _plan(checkpoint, architecture, task, modules)


def as_pooling(checkpoint: Checkpoint, plan: PoolingPlan) -> Checkpoint:
    """The checkpoint, to be loaded for its hidden states: as one of the native family that computes them."""
    if plan.family is None:
        return replace(checkpoint, pools=True)
    return replace(checkpoint, pools=True, config={**checkpoint.config, "architectures": [plan.family]})


def _check_generates(architecture: str, own_task: PoolingTask | None, convert: ConvertKind) -> None:
    if own_task is not None:
        raise ConfigError(f"runner generate: {architecture} generates no text, it pools ({own_task})")
    if convert not in ("auto", "none"):
        raise ConfigError(f"convert {convert} is for models that pool: set runner to pooling, or leave it out")


def _plan(checkpoint: Checkpoint, architecture: str, task: PoolingTask, modules: _Modules | None) -> PoolingPlan:
    config = checkpoint.config
    is_encoder = config.get("model_type") in ENCODERS
    family = None if is_encoder else base_family(architecture)
    if not is_encoder and family is None and not architecture.endswith("ForCausalLM"):
        raise CheckpointError(
            f"{architecture} pools in no way that is known here: encoders are {', '.join(sorted(ENCODERS))}; decoders "
            f"are {', '.join(FAMILIES)}, their Model and their ForSequenceClassification"
        )
    if task == "embed":
        found = modules or _Modules("cls" if is_encoder else "last", True, ())
        size = found.dense[-1].num_out if found.dense else 0
        pooling = Pooling(
            task=task,
            method=found.method,
            size=size,
            activation="normalize" if found.normalizes else "none",
            dimensions=_dimensions(config),
            is_causal=not is_encoder,
        )
        return PoolingPlan(pooling=pooling, family=family, dense=found.dense, max_len=_max_len(checkpoint.path))
    return _classifier(checkpoint, architecture, task, family, is_encoder=is_encoder)


def _classifier(
    checkpoint: Checkpoint, architecture: str, task: PoolingTask, family: str | None, *, is_encoder: bool
) -> PoolingPlan:
    config = checkpoint.config
    token_names = _token_names(config)
    has_head = architecture.endswith(("ForSequenceClassification", "RewardModel"))
    if has_head and token_names and "score.weight" not in _tensor_names(checkpoint):
        has_head = False
    if not has_head and (not token_names or is_encoder):
        raise ConfigError(
            f"convert {task}: {architecture} has no head for it, and config.json no classifier_from_token "
            '(--hf-overrides \'{"classifier_from_token": ["no", "yes"]}\', say)'
        )
    if has_head and not is_encoder and family is None:
        raise CheckpointError(f"{architecture}: heads of sequence classification are loaded for {', '.join(FAMILIES)}")
    labels = _labels(config)
    if has_head:
        num_labels, token_names = max(len(labels), 1), ()
    else:
        labels = () if len(token_names) == 2 else token_names
        num_labels = 1 if len(token_names) == 2 else len(token_names)
    pooling = Pooling(
        task=task,
        method="cls" if is_encoder else "last",
        size=num_labels,
        activation="none" if task == "reward" else _label_activation(config, num_labels),
        labels=labels if len(labels) == num_labels else (),
        is_causal=not is_encoder,
    )
    return PoolingPlan(
        pooling=pooling, family=family, has_head=has_head, token_names=token_names, max_len=_max_len(checkpoint.path)
    )


def _label_activation(config: Mapping[str, Any], num_labels: int) -> Activation:
    """As sentence-transformers and vLLM decide it."""
    named = (config.get("sentence_transformers") or {}).get("activation_fn") or config.get(
        "sbert_ce_default_activation_function"
    )
    if isinstance(named, str):
        return "none" if named.endswith("Identity") else "sigmoid"
    kinds: Mapping[str, Activation] = {"regression": "none", "multi_label_classification": "sigmoid"}
    problem = config.get("problem_type")
    return kinds.get(str(problem), "sigmoid" if num_labels == 1 else "softmax")


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the labels by index; two of transformers' own names where the config is silent."""
    given = config.get("id2label")
    if isinstance(given, Mapping) and 0 < len(given) <= MAX_LABELS:
        names = {str(index): str(name) for index, name in given.items()}
        if all(str(index) in names for index in range(len(names))):
            return tuple(names[str(index)] for index in range(len(names)))
        raise CheckpointError("config.json: id2label must name the labels 0 and on")
    num_labels = ConfigReader(config).integer("num_labels", 2)
    if num_labels > MAX_LABELS:
        raise CheckpointError(f"config.json: num_labels {num_labels}; at most {MAX_LABELS} are allowed")
    return tuple(f"LABEL_{index}" for index in range(num_labels))


def _token_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config.get("classifier_from_token")
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) < 2 or not all(isinstance(name, str) for name in given):
        raise CheckpointError(f"config.json: classifier_from_token must be a list of tokens, got {repr(given)[:80]}")
    return tuple(given)


def _dimensions(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    given = config.get("matryoshka_dimensions")
    if isinstance(given, list) and given and all(isinstance(size, int) and size > 0 for size in given):
        return tuple(given)
    return () if config.get("is_matryoshka") is True else None


def _read_modules(folder: Path) -> _Modules | None:
    """What modules.json lists; None where there is none, so that the model is none of sentence-transformers."""
    if not (folder / MODULES_FILE).is_file():
        return None
    entries = read_object(folder / MODULES_FILE, list)
    method: PoolingMethod | None = None
    dense: list[DenseSpec] = []
    normalizes = False
    for entry in entries:
        kind, place = str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path", ""))
        inside = _module_folder(folder, place)
        if kind == "Pooling":
            method = _read_method(inside / "config.json")
        elif kind == "Dense":
            dense.append(_read_dense(inside))
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise CheckpointError(f"{folder / MODULES_FILE}: a module of type {kind!a} is not supported")
    return _Modules(method or "mean", normalizes, tuple(dense))


def _module_folder(folder: Path, place: str) -> Path:
    """Where a module's files are. Raises `CheckpointError` for what leads out of the folder."""
    inside = folder / place
    if place and (Path(place).name != place or inside.resolve().parent != folder.resolve()):
        raise CheckpointError(f"{folder / MODULES_FILE}: path {place[:80]!a} is not a folder beside it")
    return inside


def _read_method(path: Path) -> PoolingMethod:
    given = read_object(path)
    named = given.get("pooling_mode")  # as sentence-transformers writes it from version 5.2 on
    if isinstance(named, str):
        wanted = [method for method in METHODS.values() if {"lasttoken": "last"}.get(named, named) == method]
        unknown = [] if wanted else [named]
    else:
        wanted = [method for name, method in METHODS.items() if given.get(name) is True]
        unknown = [name for name, value in given.items() if name.startswith("pooling_mode_") and value is True]
        unknown = [name for name in unknown if name not in METHODS]
    if unknown or len(wanted) != 1:
        raise CheckpointError(f"{path}: one of {', '.join(METHODS.values())} is supported, got {unknown or wanted}")
    return wanted[0]


def _read_dense(folder: Path) -> DenseSpec:
    read = ConfigReader(read_object(folder / "config.json"), f"{folder.name}/")
    activation = read.text("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2]
    if activation not in DENSE_ACTIVATIONS:
        raise CheckpointError(f"{folder}: the activation function {activation!a} is not supported")
    if not (folder / "model.safetensors").is_file():
        raise CheckpointError(f"{folder}: there is no model.safetensors")
    return DenseSpec(
        folder, read.integer("in_features"), read.integer("out_features"), read.flag("bias", default=True), activation
    )


def _max_len(folder: Path) -> int | None:
    """Tokens of an input at most, where sentence-transformers cuts longer ones."""
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return None
    given = read_object(path).get("max_seq_length")
    return given if isinstance(given, int) and given > 0 else None


def _tensor_names(checkpoint: Checkpoint) -> set[str]:
    return {name for path in checkpoint.weight_files for name in read_header(path)}

"""Encoder: a model that transformers computes on whole sequences, each position seeing all others; no cache.

    token ids, padded [S, L]      ->  hidden states [S, L, E]  ->  pooled [S, E]  ->  head  ->  [S, O]
    on a CPU, unpadded [1, T]     ->  hidden states [T, E]     ->  pooled [S, E]  ->  head  ->  [S, O]
    a classifier of its own       ->  its scores [S, O]

S sequences, L tokens of the longest, T tokens of all. On a GPU a launch more for each length would cost more than
padding. Importing this module imports transformers.
"""

import inspect
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoModelForSequenceClassification

from aserve.core.errors import CheckpointError
from aserve.core.foreign import foreign
from aserve.core.pooling import PoolingMethod
from aserve.models.checkpoint import Checkpoint
from aserve.models.pooler_head import PoolerHead, load_head
from aserve.models.pooling import PoolingPlan
from aserve.models.spec import read_architecture
from aserve.models.transformers_loading import check_size, random_model, read_model
from aserve.models.unpadded import ATTENTION, NotHandedOnError, register, runs_of
from aserve.models.weights import RandomWeights

OFFSET_POSITIONS: Final = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Model types that count positions from behind the padding token's id."""


Whole = tuple[list[int], int | None]
"""A sequence's tokens, and where the second text begins in them, if one does."""


class Encoder:
    """Whole sequences to what they are pooled to. context_len: tokens of one at most.

    pads: whether sequences are computed as if all had the length of the longest; else `model` attends by ATTENTION.
    """

    def __init__(self, model: Any, plan: PoolingPlan, head: PoolerHead, *, pads: bool = True) -> None:
        config = model.config
        self._model = model
        self.pads = pads
        self._method = plan.pooling.method
        self._head = head
        self._classifies = plan.has_head
        self.vocab_size: int = config.vocab_size
        self.hidden_size: int = config.hidden_size
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._pad_id = config.pad_token_id or 0
        self._first_position = self._pad_id + 1 if config.model_type in OFFSET_POSITIONS else 0
        self.context_len: int = config.max_position_embeddings - self._first_position
        self._takes_types = "token_type_ids" in inspect.signature(model.forward).parameters and (
            getattr(config, "type_vocab_size", 0) > 1
        )

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        device: torch.device = self._model.device
        return device

    def __call__(self, sequences: list[Whole]) -> Tensor:
        """[S, O], float32."""
        if self._classifies:
            output, _ = self._padded(sequences)
            logits: Tensor = output.logits
            return logits.float()
        if self.pads:
            output, lens_S = self._padded(sequences)
            return self._head(pool_padded(output.last_hidden_state, lens_S, self._method))
        lens = [len(token_ids) for token_ids, _ in sequences]
        return self._head(pool_unpadded(self._unpadded(sequences, lens), lens, self._method))

    def of_tokens(self, sequence: Whole) -> Tensor:
        """[its tokens, O], float32: the same of each token. The model is no classifier."""
        if self.pads:
            output, _ = self._padded([sequence])
            return self._head(output.last_hidden_state[0])
        return self._head(self._unpadded([sequence], [len(sequence[0])]))

    def hands_on(self) -> bool:
        """Whether the model tells its attention what it has to know of sequences that are not padded."""
        try:
            self._unpadded([([0, 0], None), ([0], None)], [2, 1])
        except NotHandedOnError:
            return False
        return True

    def _unpadded(self, sequences: list[Whole], lens: list[int]) -> Tensor:
        """Hidden states, [T, E]."""
        ids_1T = torch.tensor([[token_id for token_ids, _ in sequences for token_id in token_ids]], device=self.device)
        positions = [place for length in lens for place in range(self._first_position, self._first_position + length)]
        given: dict[str, Tensor] = {"position_ids": torch.tensor([positions], device=self.device)}
        if self._takes_types and any(second is not None for _, second in sequences):
            types = [
                int(second is not None and place >= second)
                for (_, second), length in zip(sequences, lens, strict=True)
                for place in range(length)
            ]
            given["token_type_ids"] = torch.tensor([types], device=self.device)
        output = self._model(ids_1T, return_dict=True, aserve_runs=runs_of(lens), **given)
        hidden_TE: Tensor = output.last_hidden_state[0]
        return hidden_TE

    def _padded(self, sequences: list[Whole]) -> tuple[Any, Tensor]:
        """What transformers' model gives, and how many tokens each sequence has."""
        lens = [len(token_ids) for token_ids, _ in sequences]
        longest = max(lens)
        padded = [token_ids + [self._pad_id] * (longest - len(token_ids)) for token_ids, _ in sequences]
        ids_SL = torch.tensor(padded, device=self.device)
        lens_S = torch.tensor(lens, device=self.device)
        places_L = torch.arange(longest, device=self.device)
        mask_SL = (places_L < lens_S[:, None]).long()
        given: dict[str, Tensor] = {"attention_mask": mask_SL}
        if self._takes_types and any(second is not None for _, second in sequences):
            seconds_S = torch.tensor([longest if at is None else at for _, at in sequences], device=self.device)
            given["token_type_ids"] = (places_L >= seconds_S[:, None]).long() * mask_SL
        return self._model(ids_SL, return_dict=True, **given), lens_S


def pool_padded(hidden_SLE: Tensor, lens_S: Tensor, method: PoolingMethod) -> Tensor:
    """[S, E]: of each sequence the hidden state of its first or last token, or the mean of all, in float32."""
    if method == "cls":
        return hidden_SLE[:, 0]
    if method == "last":
        return hidden_SLE[torch.arange(len(lens_S), device=lens_S.device), lens_S - 1]
    mask_SL = torch.arange(hidden_SLE.shape[1], device=lens_S.device) < lens_S[:, None]
    return torch.einsum("sle,sl->se", hidden_SLE.float(), mask_SL.float()) / lens_S[:, None]


def pool_unpadded(hidden_TE: Tensor, lens: list[int], method: PoolingMethod) -> Tensor:
    """[S, E]: the same of sequences behind each other."""
    if method == "mean":
        return torch.stack([hidden_LE.float().mean(0) for hidden_LE in torch.split(hidden_TE, lens)])
    ends = list(accumulate(lens))
    firsts = [end - length for end, length in zip(ends, lens, strict=True)]
    return hidden_TE[firsts if method == "cls" else [end - 1 for end in ends]]


def load_encoder(
    checkpoint: Checkpoint, plan: PoolingPlan, dtype: torch.dtype, device: torch.device, seed: int | None
) -> Encoder:
    """The model of a folder. seed: draw the weights instead of reading them. Raises `CheckpointError`, one line."""
    architecture = read_architecture(checkpoint.config)
    options: dict[str, Any] = {"dtype": dtype}
    with foreign(f"{checkpoint.path}: {architecture} does not run through transformers"):
        config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
        auto: Any = AutoModelForSequenceClassification if plan.has_head else AutoModel
        pads = plan.has_head or device.type != "cpu" or not MODEL_MAPPING[type(config)]._supports_attention_backend
        if not pads:
            register()
            options["attn_implementation"] = ATTENTION
        if not plan.has_head and "add_pooling_layer" in inspect.signature(MODEL_MAPPING[type(config)]).parameters:
            options["add_pooling_layer"] = False
        if seed is None:
            check_size(auto, config, options, checkpoint)
            model = read_model(auto, checkpoint, options | {"local_files_only": True, "config": config})
        else:
            model = random_model(auto, config, options, RandomWeights(dtype, device, seed), device)
    if config.max_position_embeddings < 2:
        raise CheckpointError("config.json: max_position_embeddings must be at least 2")
    head = load_head(checkpoint, plan, config.hidden_size, (), device, seed)
    model = model.to(device).eval()
    encoder = Encoder(model, plan, head, pads=pads)
    if pads or encoder.hands_on():
        return encoder
    model.set_attn_implementation("sdpa")
    return Encoder(model, plan, head)

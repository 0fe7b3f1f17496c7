"""Request: what the scheduler is asked to generate, everything slow already done."""

import re
from typing import Final, TypedDict

import msgspec

from aserve.core.errors import InvalidRequestError
from aserve.core.ids import AdapterId, BlockHash, ExtraKey, RequestId
from aserve.core.params import SamplingParams
from aserve.core.ports import Structure
from aserve.core.rules import Rules, flag, integer, matching, number, optional, text

REQUEST_ID: Final = re.compile(r"^[!-~]{1,128}\Z")
"""Names that requests may have: they go into headers and into log lines."""
CACHE_SALT: Final = re.compile(r"^[^@/\\\x00\ud800-\udfff]{0,128}\Z")
MAX_TIMEOUT_S: Final = 1e9
TIMEOUT: Final = optional(number(0.0, MAX_TIMEOUT_S, low_open=True, unit="seconds"))
PRIORITY: Final = integer(-(2**31), 2**31 - 1)


class SharedTerms(TypedDict, total=False):
    """Terms that several requests may have in common.

    cache_salt: prompts share cached blocks only under equal salts. priority: lower runs first, where the policy heeds
    it. timeout_s: from arrival on, in seconds; then the request ends with what it has. tenant: whose account it
    is on. lora: the name of the adapter that answers; None for the model as it is. explain: note where its time goes,
    see core/explanation.py.
    """

    cache_salt: str
    priority: int
    timeout_s: float | None
    tenant: str
    lora: str | None
    explain: bool


class RequestTerms(SharedTerms, total=False):
    """Terms of one request, as keyword arguments. request_id: a name of its own, for `abort`; None draws one.

    name: what it is called elsewhere, which others may be too. spent_s: seconds that it has taken there; told by its
    explanation, and of no other effect.
    """

    request_id: str | None
    name: str
    spent_s: float


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On what terms a request comes: what is neither its prompt nor how it is sampled. The fields are Request's.

    isolates_cache: its tenant shares cached blocks with nobody. lora: an adapter by name, adapter: once it is loaded.

    Raises `InvalidRequestError`, naming the field, for what a caller gives of another type or out of bounds.
    """

    arrival_s: float
    request_id: str | None = None
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    tenant: str = ""
    weight: float = 1.0
    isolates_cache: bool = False
    lora: str | None = None
    adapter: AdapterId | None = None
    explain: bool = False
    name: str = ""
    spent_s: float = 0.0

    def __post_init__(self) -> None:
        TERM_RULES.settle(self)


TERM_RULES: Final = Rules(
    InvalidRequestError,
    {
        "request_id": optional(matching(REQUEST_ID, "1 to 128 printable ASCII characters without a space")),
        "cache_salt": matching(CACHE_SALT, r"at most 128 characters, none of them @, /, \ or NUL"),
        "priority": PRIORITY,
        "lora": optional(text),
        "explain": flag,
        "name": text,
        "spent_s": number(0.0, MAX_TIMEOUT_S, unit="seconds"),
    },
)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and what to do with it, fully resolved: no field below needs a model or a tokenizer to be read.

    max_tokens: the output cap, already clamped to the room that max_model_len leaves.
    stop_ids: tokens that end the sequence (stop_token_ids, and the model's own unless ignore_eos).
    eos_ids: those of stop_ids that are the model's own; ending at one of them has no stop_reason.
    seed: always set; drawn at random where the caller gave none. The k-th sequence of a request has seed + k.
    cache_salt: enters the root of the prefix hash; requests share cached blocks only under equal salts.
    adapter: by which the model is changed for it; None for the model as it is.
    priority: lower runs first, under the priority policy.
    bad_word_ids: params.bad_words as token sequences.
    prompt_hashes: names of the prompt's first full blocks, as far as they were computed beforehand.
    arrival_s: the engine's clock when it came, in seconds; orders the queue, never compared with wall time.
    deadline_s: on the same clock, when it ends with what it has; None is never.
    tenant: on whose account it runs; "" where nobody is told apart. weight: the tenant's share, under the fair policy.
    structure: params.structured, compiled; None where an answer may be anything.
    second_at, per_token: see `RowInit`.
    explain: whether it is noted where its time goes. name, spent_s: see `RequestTerms`.
    """

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int
    arrival_s: float
    stop_ids: frozenset[int] = frozenset()
    eos_ids: frozenset[int] = frozenset()
    cache_salt: bytes = b""
    priority: int = 0
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    prompt_hashes: tuple[BlockHash, ...] = ()
    deadline_s: float | None = None
    tenant: str = ""
    weight: float = 1.0
    structure: Structure | None = None
    adapter: AdapterId | None = None
    second_at: int | None = None
    per_token: bool = False
    explain: bool = False
    name: str = ""
    spent_s: float = 0.0

    @property
    def extra_keys(self) -> tuple[ExtraKey, ...]:
        """What its blocks hold besides what tokens and salt say: the adapter's keys and values, from the first on."""
        return () if self.adapter is None else ((0, b"adapter %d" % self.adapter),)

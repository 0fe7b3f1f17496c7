"""From what a caller asks (token ids, SamplingParams) to the Request that the scheduler takes, or the reason why not.

Everything that needs the model's facts or its tokenizer to be decided is decided here: caps, ending tokens, seeds, bad
words as tokens. Knows no engine, no loop and no HTTP.
"""

import secrets
import uuid
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from typing import Any, Final

import msgspec

from aserve.core.config import ModelInfo
from aserve.core.errors import ContextLengthError, InvalidRequestError
from aserve.core.ids import RequestId
from aserve.core.params import DEFAULT_MAX_LOGPROBS, MAX_SCORES, SamplingParams, num_likeliest
from aserve.core.pooling import TokenizedInput
from aserve.core.ports import Structure
from aserve.core.request import TIMEOUT, Request, Terms
from aserve.core.rules import MAX_INT, Refused, check, instance, integer, integers, series, text
from aserve.tenants import Tenant
from aserve.text.tokenizer import Tokenizer

MAX_BAD_WORD_TOKENS: Final = 4096
"""Of a request's bad words together, which travel to the device with each of its steps."""
PARAMS: Final = instance(SamplingParams)
ONE_TOKEN: Final = SamplingParams(temperature=0.0, max_tokens=1)
MAX_BRANCHES: Final = 2**16
_CHOICE: Final = integer(0, MAX_INT)
_NUM_BRANCHES: Final = integer(0, MAX_BRANCHES)
_BRANCHES: Final = series("a sequence", at_most=MAX_BRANCHES)
_IDS: Final = series("a sequence of texts, one for each branch")
_PROMPT: Final = integers(at_most=2**31, allowed="a text or a sequence of token ids")


def prompt_ids(prompt: object, param: str = "prompt") -> tuple[int, ...]:
    """The token ids of a prompt that is no text. Raises `InvalidRequestError` if it is no prompt either."""
    ids: tuple[int, ...] = check(param, _PROMPT, prompt)
    return ids


def known_id(request_id: object) -> RequestId:
    """By which a request is looked for. Raises `InvalidRequestError` for what is no text."""
    return RequestId(check("request_id", text, request_id))


def new_terms(
    arrival_s: float,
    tenant: Tenant,
    longest_s: float | None = None,
    *,
    request_id: str | None = None,
    cache_salt: str = "",
    priority: int = 0,
    timeout_s: float | None = None,
    **others: Any,
) -> Terms:
    """What a caller's terms come to for a request that arrived at `arrival_s`. Raises `InvalidRequestError`.

    longest_s: see `deadline`. others: as they are.
    """
    return Terms(
        arrival_s=arrival_s,
        request_id=request_id,
        cache_salt=cache_salt,
        priority=priority,
        deadline_s=deadline(arrival_s, timeout_s, longest_s),
        tenant=tenant.name,
        weight=tenant.weight,
        isolates_cache=tenant.isolate_cache,
        **others,
    )


def deadline(arrival_s: float, timeout_s: float | None, longest_s: float | None) -> float | None:
    """When a request ends, on the clock that `arrival_s` was read from: after the shorter of two times.

    timeout_s: its own. longest_s: what the engine gives any. Raises `InvalidRequestError`.
    """
    checked: float | None = check("timeout_s", TIMEOUT, timeout_s)
    times = [time_s for time_s in (checked, longest_s) if time_s is not None]
    return arrival_s + min(times) if times else None


def branches_of(
    branches: object, index: object, default: Callable[[], SamplingParams]
) -> tuple[list[SamplingParams], int]:
    """The parameters of each branch, and of which choice they are. Raises `InvalidRequestError`.

    branches: their parameters, or how many have the default ones.
    """
    choice: int = check("index", _CHOICE, index)
    given = check("branches", _branches, branches)
    if isinstance(given, int):
        return [default()] * given, choice
    return [check(f"branches[{place}]", PARAMS, params) for place, params in enumerate(given)], choice


def _branches(value: object) -> Any:
    """The rule: a sequence, or the number of them."""
    for rule in (_BRANCHES, _NUM_BRANCHES):
        with suppress(Refused):
            return rule(value)
    raise Refused(f"a sequence of at most {MAX_BRANCHES} SamplingParams, or how many branches there are")


def branch_terms(
    origin: Request,
    num: int,
    arrival_s: float,
    longest_s: float | None,
    request_ids: Sequence[str] | None,
    priority: int | None,
    timeout_s: float | None,
    explain: bool,
) -> list[Terms]:
    """Those of `num` branches of a request, which are its own where they are None. longest_s: see `deadline`.

    Raises `InvalidRequestError`, also for a request whose choices are ranked: which is which is known at its end.
    """
    if origin.params.is_ranked:
        raise InvalidRequestError("ranked choices and beams cannot be forked", "index")
    ids: Sequence[str | None] = [None] * num if request_ids is None else check("request_ids", _IDS, request_ids)
    if len(ids) != num:
        raise InvalidRequestError(f"request_ids must be as many as the branches ({num}), got {len(ids)}", "request_ids")
    return [
        Terms(
            arrival_s=arrival_s,
            request_id=request_id,
            priority=origin.priority if priority is None else priority,
            deadline_s=origin.deadline_s if timeout_s is None else deadline(arrival_s, timeout_s, longest_s),
            tenant=origin.tenant,
            weight=origin.weight,
            explain=explain,
        )
        for request_id in ids
    ]


def new_request(
    info: ModelInfo,
    tokenizer: Tokenizer,
    prompt_token_ids: tuple[int, ...],
    params: SamplingParams,
    terms: Terms,
    structure: Structure | None = None,
) -> Request:
    """A Request with an id and a seed of its own, unless they are given. Its prompt's ids are checked elsewhere.

    structure: params.structured, compiled, and the budget of thoughts. Its end is the model's own, which ends the
    answer even where it is ignored otherwise; the scheduler sees to it that it comes last.

    Raises `InvalidRequestError` naming the field that is out of bounds, and `ContextLengthError` for a prompt that
    leaves no room to answer.
    """
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt is empty: it has no tokens", "prompt")
    room = check_room(info, len(prompt_token_ids))
    check_ids("stop_token_ids", params.stop_token_ids, info.vocab_size)
    check_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], info.vocab_size)
    check_ids("allowed_token_ids", params.allowed_token_ids or (), info.vocab_size)
    check_ids("logprob_token_ids", params.logprob_token_ids, info.vocab_size)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    params = _with_logprobs(info, params, len(prompt_token_ids), max_tokens)
    eos_ids = frozenset[int]() if params.ignore_eos and params.structured is None else info.eos_ids
    stop_ids = eos_ids | frozenset(params.stop_token_ids)
    bad_word_ids = _bad_word_ids(tokenizer, params.bad_words)
    _check_choice_left(params, stop_ids, bad_word_ids)
    return Request(
        id=RequestId(terms.request_id or uuid.uuid4().hex),
        prompt_token_ids=prompt_token_ids,
        params=params,
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if params.seed is None else params.seed,
        arrival_s=terms.arrival_s,
        stop_ids=stop_ids,
        eos_ids=eos_ids,
        cache_salt=_salt(terms),
        priority=terms.priority,
        bad_word_ids=bad_word_ids,
        deadline_s=terms.deadline_s,
        tenant=terms.tenant,
        weight=terms.weight,
        structure=None if structure is None else structure.going_on(ignores_end=params.ignore_eos),
        adapter=terms.adapter,
        explain=terms.explain,
        name=terms.name,
        spent_s=terms.spent_s,
    )


def new_branch(
    info: ModelInfo,
    tokenizer: Tokenizer,
    origin: Request,
    history: tuple[int, ...],
    params: SamplingParams,
    terms: Terms,
    structure: Structure | None = None,
) -> Request:
    """A Request that continues a choice of `origin`, whose prompt and answer so far are `history`.

    Its salt and its adapter are the origin's, whatever the terms say, and so is a structure that both were asked for,
    with the same budget of thoughts: the branch goes on in it. Raises as `new_request`.
    """
    if origin.structure is not None and all(
        getattr(params, field) == getattr(origin.params, field) for field in ("structured", "thinking_token_budget")
    ):
        structure = origin.structure.after(history[len(origin.prompt_token_ids) :])
    branch = new_request(info, tokenizer, history, params, terms, structure)
    return msgspec.structs.replace(branch, cache_salt=origin.cache_salt, adapter=origin.adapter)


def check_room(info: ModelInfo, num_tokens: int, param: str = "prompt") -> int:
    """The tokens that a prompt of so many leaves for its answer. Raises `ContextLengthError` where that is none."""
    if num_tokens >= info.max_model_len:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens and leaves no room to answer: "
            f"the context is {info.max_model_len} tokens",
            param,
        )
    return info.max_model_len - num_tokens


def check_generates(info: ModelInfo) -> None:
    """Raise `InvalidRequestError` for a model that generates no text."""
    if info.pooling is not None:
        raise InvalidRequestError(
            f"this server pools ({info.pooling.task}) and generates no text: start aserve with --runner generate,"
            " where the model can",
            "model",
        )


def check_input(info: ModelInfo, num_tokens: int, name: str) -> None:
    """Raise for an input of a model that pools that has no tokens, or more than the model takes.

    name: of the input, such as "input[3]"; an error's param is its outermost field.
    """
    param = name.partition("[")[0]
    if num_tokens == 0:
        raise InvalidRequestError(f"{name} is empty: it has no tokens", param)
    if num_tokens > info.max_model_len:
        raise ContextLengthError(
            f"{name} has {num_tokens} tokens, and the model takes at most {info.max_model_len}:"
            " truncate_prompt_tokens cuts longer ones",
            param,
        )


def new_input(info: ModelInfo, tokens: TokenizedInput, terms: Terms, *, per_token: bool = False) -> Request:
    """A Request for a vector, or one of each token: of one token, in whose place it comes. Ids are checked elsewhere.

    Raises as `check_input`.
    """
    check_input(info, len(tokens.token_ids), "input")
    return Request(
        id=RequestId(terms.request_id or uuid.uuid4().hex),
        prompt_token_ids=tokens.token_ids,
        params=ONE_TOKEN,
        max_tokens=1,
        seed=0,
        arrival_s=terms.arrival_s,
        cache_salt=_salt(terms),
        priority=terms.priority,
        deadline_s=terms.deadline_s,
        tenant=terms.tenant,
        weight=terms.weight,
        second_at=tokens.second_at,
        per_token=per_token,
        explain=terms.explain,
        name=terms.name,
        spent_s=terms.spent_s,
    )


def _with_logprobs(info: ModelInfo, params: SamplingParams, num_prompt: int, max_tokens: int) -> SamplingParams:
    """With the numbers of likeliest tokens that the request's come to.

    Raises `InvalidRequestError` for more of them than the engine gives, or so many scores that they would fill memory.
    """
    places = {"logprobs": params.num_sequences * max_tokens, "prompt_logprobs": num_prompt}
    settled = {}
    for field, num_places in places.items():
        wanted = getattr(params, field)
        if wanted is None or (field == "logprobs" and params.logprob_token_ids):
            continue
        num = num_likeliest(field, wanted, info.max_logprobs, info.vocab_size)
        if num != wanted:
            settled[field] = num
        if num > DEFAULT_MAX_LOGPROBS and num * num_places > MAX_SCORES:
            raise InvalidRequestError(
                f"{field}: {num} tokens at {num_places} places are more than {MAX_SCORES} scores:"
                " ask for fewer, or lower max_tokens",
                field,
            )
    return msgspec.structs.replace(params, **settled) if settled else params


def _salt(terms: Terms) -> bytes:
    """What keeps its cached blocks from others."""
    return (f"{terms.tenant}@{terms.cache_salt}" if terms.isolates_cache else terms.cache_salt).encode()


def check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise `InvalidRequestError` for the first id that is outside the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{field}: token id {token_id} is out of vocabulary, not in [0, {vocab_size})", field
            )


def _bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as tokens, at the beginning of a text and after a space: a tokenizer tells the two apart."""
    found: dict[tuple[int, ...], None] = {}
    num_tokens = 0
    for spelling in (spelled for word in words for spelled in (word, f" {word.lstrip()}")):
        token_ids = tokenizer.encode(spelling, add_special_tokens=False, param="bad_words")
        if token_ids and token_ids not in found:
            found[token_ids] = None
            num_tokens += len(token_ids)
        if num_tokens > MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(f"bad_words may have at most {MAX_BAD_WORD_TOKENS} tokens together", "bad_words")
    return tuple(found)


def _check_choice_left(params: SamplingParams, stop_ids: Set[int], bad_word_ids: Sequence[tuple[int, ...]]) -> None:
    """Raise `InvalidRequestError` where every token that is allowed is banned from the start.

    Where that comes to pass later, by a bad word of several tokens, the step's bans are void (kernels/reference.py).
    """
    if params.allowed_token_ids is None:
        return
    banned = {word[0] for word in bad_word_ids if len(word) == 1} | (stop_ids if params.min_tokens else set())
    if banned.issuperset(params.allowed_token_ids):
        raise InvalidRequestError("allowed_token_ids: every one of them is banned", "allowed_token_ids")

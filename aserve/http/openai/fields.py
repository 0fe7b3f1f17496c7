"""Fields that a request may have: those that work are in the shapes, the others are here, with what becomes of them.

A field is never silently ignored when it would change the answer: a known one that does not work yet is refused, except
with a value that asks for nothing (what is in NEUTRAL); an unknown one is refused with the nearest known name.
Null asks for nothing under any name: libraries send it for what their users left out.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from aserve.core.errors import InvalidRequestError
from aserve.http.errors import echo
from aserve.http.shapes import UnknownFieldError, nearest

MAX_IGNORED_BYTES: Final = 16 * 1024

WITHOUT_EFFECT: Final = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "session_id", "watermarking", "return_weight_versions"),
    }
)
"""Accepted up to MAX_IGNORED_BYTES each, and not looked at: the answer is the same with and without them."""

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_logprobs": (0,),
    "spaces_between_special_tokens": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
    "modalities": (["text"],),
    "tool_choice": ("none",),
    "tool_calls": ([],),
    "parallel_tool_calls": (True,),
    "include_reasoning": (True,),
    "return_prompt_text": (False,),
    "annotations": ([],),
    "include_obfuscation": (False,),
}
"""Known fields (of requests, messages and options) that do not work yet, with the values that ask for nothing."""

UNSUPPORTED: Final = frozenset(
    {
        *("add_generation_prompt", "audio", "chat_template"),
        *("documents", "ec_transfer_params", "function_call", "functions", "guided_choice", "guided_grammar"),
        *("guided_json", "guided_regex", "kv_transfer_params", "logits_processors"),
        *("media_io_kwargs", "mm_processor_kwargs", "moderation", "prediction", "prompt_embeds"),
        *("reasoning_effort", "repetition_detection", "refusal", "routed_experts"),
        *("stream_interval", "suffix", "tools"),
        *("verbosity", "vllm_xargs", "web_search_options"),
        # of SGLang
        *("beam_width", "custom_logit_processor", "ebnf", "extra_key", "lora_path", "no_stop_trim", "regex"),
        *("return_hidden_states", "rid", "separate_reasoning", "session_params", "stop_regex"),
        # of llama.cpp
        *("cache_prompt", "id_slot", "mirostat", "n_keep", "post_sampling_probs", "return_progress", "samplers"),
        *("dry_allowed_length", "dry_base", "dry_multiplier", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("mirostat_eta", "mirostat_tau", "xtc_probability", "xtc_threshold"),
        *("sse_ping_interval", "t_max_predict_ms", "timings_per_token", "typical_p"),
    }
)
"""Known fields that do not work yet, and of which only null asks for nothing."""


def check_names(fields: dict[str, Any], supported: Collection[str], where: str = "") -> None:
    """Raise `InvalidRequestError` for the first field that cannot be taken as it is.

    where: the path of the object, such as "messages[0]."; param is its outermost field.
    """
    for name, value in fields.items():
        if name in supported or value is None:
            continue
        path = where + echo(name)[1:-1]
        param = where.partition(".")[0].partition("[")[0] or path
        if name in WITHOUT_EFFECT:
            if len(msgspec.json.encode(value)) > MAX_IGNORED_BYTES:
                raise InvalidRequestError(f"{path} is longer than {MAX_IGNORED_BYTES} bytes", param)
        elif name not in NEUTRAL and name not in UNSUPPORTED:
            known = supported if where else [*supported, *WITHOUT_EFFECT, *NEUTRAL, *UNSUPPORTED]
            raise UnknownFieldError(f"unknown field {path}{nearest(name, known)}", param, fields, name)
        elif not _is_neutral(name, value):
            raise InvalidRequestError(f"{path} is not supported yet", param)


def _is_neutral(name: str, value: Any) -> bool:
    # Types as well: in Python True == 1 == 1.0, and "n": true asks for nothing that makes sense.
    return any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(name, ()))

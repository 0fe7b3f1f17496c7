"""Every request field of docs/api.md: it works, it is refused with a 400 that says so, or it is listed as ineffective.

The table has a value for each that asks for something: one that works is answered, one that is refused names the field.
Run with -s to see the counts.
"""

from collections import Counter

import pytest

from aserve.http import create_app
from aserve.http.openai.chat import ChatFields
from aserve.http.openai.completions import CompletionFields
from aserve.http.openai.fields import NEUTRAL, UNSUPPORTED, WITHOUT_EFFECT
from aserve.http.openai.schema import GenerationFields
from aserve.text.chat_template import ChatTemplate
from tests.engines import TEMPLATE, scripted_engine, scripted_loader
from tests.fakes import FakeKV, ScriptedRunner
from tests.http.conftest import client_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    TEXT: {"prompt": "hi", "max_tokens": 2},
}
STREAM = {"stream": True}
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
TOOL = {"type": "function", "function": {"name": "f"}}

BOTH_WORK = {
    "model": "scripted",
    "max_tokens": 1,
    "max_completion_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "stop": ["a", "b"],
    "stop_token_ids": [97],
    "ignore_eos": True,
    "min_tokens": 1,
    "seed": 7,
    "prompt_logprobs": 2,
    "logprob_token_ids": ([97, 98], {"logprobs": True}),
    "logit_bias": {"97": 5},
    "allowed_token_ids": [97, 98],
    "bad_words": ["no"],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "stream": True,
    "stream_options": ({"include_usage": True, "continuous_usage_stats": True}, STREAM),
    "echo": True,
    "add_special_tokens": False,
    "truncate_prompt_tokens": 1,
    "truncation_side": ("right", {"truncate_prompt_tokens": 1}),
    "priority": 3,
    "x_aserve": {"explain": True},
    "timeout_s": 60,
    "cache_salt": "salt",
    "request_id": "mine",
    "return_token_ids": True,
    "return_tokens_as_token_ids": (True, {"logprobs": True}),
    "n": 2,
    "best_of": 2,
    "use_beam_search": (True, {"n": 2}),
    "length_penalty": (0.5, {"n": 2, "use_beam_search": True}),
    "early_stopping": ("never", {"n": 2, "use_beam_search": True}),
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]},
    "thinking_token_budget": 5,
}
CHAT_WORKS = {
    "messages": BODIES[CHAT]["messages"],
    "logprobs": True,
    "top_logprobs": (2, {"logprobs": True}),
    "add_generation_prompt": False,
    "continue_final_message": (True, {"messages": TURNS}),
    "chat_template_kwargs": {"enable_thinking": True},
    "tools": [TOOL],
    "tool_choice": ("auto", {"tools": [TOOL]}),
    "parallel_tool_calls": (False, {"tools": [TOOL]}),
    "reasoning_effort": "low",
    "verbosity": "low",
    "include_reasoning": False,
}
TEXT_WORKS = {"prompt": [104, 105], "logprobs": 2}
REFUSED = {
    "spaces_between_special_tokens": False,
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "stream_interval": 3,
    "chat_template": "{{ messages }}",
    "documents": [{}],
    "mm_processor_kwargs": {"a": 1},
    "media_io_kwargs": {"a": 1},
    "return_prompt_text": True,
    "repetition_detection": {"max_pattern_size": 3},
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "vllm_xargs": {"a": 1},
    "routed_experts": True,
    "prompt_embeds": "AAAA",
    "moderation": {"model": "a"},
    "suffix": "x",
    "stop_regex": "a",
    "ebnf": "a",
    "regex": "a",
    "no_stop_trim": True,
    "lora_path": "a",
    "session_params": {"a": 1},
    "custom_logit_processor": "a",
    "rid": "a",
    "extra_key": "a",
    "return_hidden_states": True,
    "separate_reasoning": True,
    "return_progress": True,
    "timings_per_token": True,
    "t_max_predict_ms": 5,
    "sse_ping_interval": 5,
    "cache_prompt": True,
    "samplers": ["a"],
    "post_sampling_probs": True,
    "typical_p": 0.5,
    "mirostat": 1,
    "n_keep": 1,
    "id_slot": 1,
    "dry_multiplier": 0.5,
    "xtc_probability": 0.5,
}
WITHOUT = {
    "session_id": "a",
    "watermarking": True,
    "return_weight_versions": True,
    "user": "a",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "a",
    "prompt_cache_key": "a",
    "prompt_cache_options": {"mode": "implicit"},
}


def cases(table, urls):
    found = []
    for name, entry in table.items():
        value, others = entry if isinstance(entry, tuple) else (entry, {})
        found += [
            pytest.param(url, name, {**others, name: value}, id=f"{name}-{'chat' if url == CHAT else 'text'}")
            for url in urls
        ]
    return found


WORKING = [*cases(BOTH_WORK, (CHAT, TEXT)), *cases(CHAT_WORKS, (CHAT,)), *cases(TEXT_WORKS, (TEXT,))]


@pytest.fixture
async def client():
    """Of an engine whose model is scored, and whose template reads a variable."""
    load = scripted_loader(runner=ScriptedRunner(model=FakeKV(8, range(260))), thought_format="think")

    def with_variable(report):
        parts = load(report)
        template = TEMPLATE + "{% if enable_thinking %}?{% endif %}{% if tools %}T{% endif %}"
        return type(parts)(
            **{name: getattr(parts, name) for name in parts.__dataclass_fields__ if name != "chat_template"},
            chat_template=ChatTemplate({"default": template}, {}),
        )

    async with type(scripted_engine())(with_variable) as engine, client_of(create_app(engine)) as client:
        yield client


async def ask(client, url, fields):
    """Stop the endless answer, but where that is what is asked about; completions call a number what chat calls yes."""
    fields = {**fields, "logprobs": 1} if url == TEXT and fields.get("logprobs") is True else fields
    return await client.post(url, json={**BODIES[url], **fields})


@pytest.mark.parametrize(("url", "name", "fields"), WORKING)
async def test_what_works_is_answered(client, url, name, fields):
    response = await ask(client, url, fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("url", "name", "fields"), cases(REFUSED, (CHAT, TEXT)))
async def test_what_does_not_work_is_refused_by_name(client, url, name, fields):
    response = await ask(client, url, fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    assert response.json()["error"]["message"] == f"{name} is not supported yet"


@pytest.mark.parametrize(("url", "name", "fields"), cases(WITHOUT, (CHAT, TEXT)))
async def test_what_has_no_effect_is_taken(client, url, name, fields):
    with_it, without = [(await ask(client, url, each)).json() for each in (fields, {})]
    assert name in WITHOUT_EFFECT
    assert with_it["choices"] == without["choices"]


def test_the_table_and_the_lists_name_the_same_fields():
    works = {*BOTH_WORK, *CHAT_WORKS, *TEXT_WORKS}
    declared = {*ChatFields.__struct_fields__, *CompletionFields.__struct_fields__}
    assert works == declared
    assert set(BOTH_WORK) == set(GenerationFields.__struct_fields__)
    assert set(REFUSED) <= set(NEUTRAL) | set(UNSUPPORTED)
    assert set(WITHOUT) <= WITHOUT_EFFECT
    kinds = {"implemented": works, "refused by name": REFUSED, "without effect": WITHOUT}
    counts = Counter({kind: len(names) for kind, names in kinds.items()})
    print("\nfields of api.md:", ", ".join(f"{count} {kind}" for kind, count in counts.items()), f"= {counts.total()}")
    assert counts.total() == len(works | set(REFUSED) | set(WITHOUT)), "no field is of two kinds"

"""The Python interface, row by row of what was wrong with it (P1 to P7), and numbers that no answer survives (F2)."""

import ast
import asyncio
import json
import pydoc
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import get_type_hints

import msgspec
import numpy as np
import pytest
import torch

import aserve
from aserve import LLM, BeamParams, Mailbox, Options, RequestTimings, SamplingParams, StructuredOutputs, build
from aserve.core import config, errors, params, request, structured
from aserve.core.config import OptionFields
from aserve.core.errors import AserveError, ConfigError, InvalidRequestError, UnavailableError
from aserve.core.outputs import Completion, FinishReason
from aserve.engine import Engine
from aserve.engine_parts import EngineParts
from aserve.http import create_app
from tests.engines import TEMPLATE, scripted_engine, scripted_loader
from tests.fakes import FakeClock, FakeKV, FakeScript, ScriptedRunner
from tests.http.conftest import client_of
from tests.http.peer import until
from tests.text.checkpoints import sentencepiece, sentencepiece_backend, write

HELLO = [{"role": "user", "content": "Hello!"}]
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


async def text_of(deltas):
    """All of an answer that is read as it grows."""
    return "".join([delta.text async for delta in deltas])


# P1, P2: types and bounds, once, at construction, for every face

REFUSED = {
    "max_tokens": (3.5, 0, True, "5", 10**400, float("nan"), [5], torch.tensor(True), torch.tensor([5]), np.True_),
    "temperature": (float("nan"), float("inf"), -1, 3, "1", True, None, 10**400),
    "top_p": (0, 1.1, float("nan"), True, "1"),
    "top_k": (2.5, 2.0, -2, 2**31, True, None),
    "min_p": (-0.1, 2, float("nan"), None),
    "seed": (1.5, 2**63, -(2**63) - 1, True, 10**5000),
    "stop": (5, b"END", [5], ["a", b"b"], {"a"}, {"a": 1}, "", ["a"] * 5, "x" * 1025, True),
    "stop_token_ids": (
        5,
        "5",
        [1.5],
        [True],
        ["5"],
        {5},
        range(129),
        np.array(5),
        torch.tensor(5),
        torch.tensor([[5]]),
    ),
    "ignore_eos": (1, 0, None, "yes"),
    "min_tokens": (1.5, -1, True, None),
    "n": (0, 129, 1.0, True, 10**6),
    "best_of": (0, 129, 2.5, True),
    "presence_penalty": (2.1, float("-inf"), float("nan"), None),
    "frequency_penalty": (-2.1, "1", True),
    "repetition_penalty": (1e-38, 0, 0.009, 101, float("nan"), None, True),
    "logit_bias": (
        5,
        "5",
        [5],
        [(1, 2, 3)],
        {1: float("nan")},
        {1: "2"},
        {1.5: 1},
        {"x": 1},
        {True: 1},
        {-1.5: 1},
        [np.array(3)],
    ),
    "allowed_token_ids": ([], 5, "5", [1.5], [None], np.array(5), torch.tensor([True])),
    "bad_words": ("abc", b"abc", [1], "", ["a"] * 129, "x" * 257, {"a"}, np.array("a")),
    "logprobs": (True, False, 1.5, -2, 2**31),
    "prompt_logprobs": (True, 1.5, -2, 2**31),
    "logprob_token_ids": (5, "5", [1.5], [1] * 129),
    "include_stop_str_in_output": (1, None),
    "skip_special_tokens": (0, "false"),
    "structured": ({"json_object": True}, "json", True),
    "thinking_token_budget": (-1, 1.5, True, "1"),
    "beam": (4, {"width": 4}, True),
}


@pytest.mark.parametrize("field", REFUSED, ids=lambda field: f"P1-{field}")
def test_p1_a_value_of_another_type_or_out_of_bounds_names_field_bounds_and_value(field):
    for value in REFUSED[field]:
        with pytest.raises(InvalidRequestError, match=rf"^{field} must .*, got ") as caught:
            SamplingParams(**{field: value})
        assert caught.value.param == field
        assert len(caught.value.message) < 200


def test_p1_every_field_has_a_rule():
    for kind, rules in (
        (SamplingParams, params.SAMPLING_RULES),
        (BeamParams, params.BEAM_RULES),
        (Options, config.OPTION_RULES),
    ):
        assert rules.fields == set(kind.__struct_fields__), kind
    assert set(REFUSED) == set(SamplingParams.__struct_fields__)
    assert request.TERM_RULES.fields >= {"request_id", "cache_salt", "priority"}


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None, "bad_words": None, "logit_bias": None}, {"stop": (), "bad_words": (), "logit_bias": ()}),
        ({"bad_words": ["abc"]}, {"bad_words": ("abc",)}),
        ({"logit_bias": {5: 1}}, {"logit_bias": ((5, 1.0),)}),
        ({"logit_bias": {"5": 1, 7: -300}}, {"logit_bias": ((5, 1.0), (7, -100.0))}),
        ({"logit_bias": [(5, 1), [5, 2]]}, {"logit_bias": ((5, 2.0),)}),
        ({"stop_token_ids": np.array([1, 2])}, {"stop_token_ids": (1, 2)}),
        ({"stop_token_ids": torch.tensor([1, 2])}, {"stop_token_ids": (1, 2)}),
        ({"top_k": torch.tensor(5)}, {"top_k": 5}),
        ({"top_k": np.int64(5), "seed": np.uint8(7)}, {"top_k": 5, "seed": 7}),
        ({"temperature": 1, "top_p": np.float32(0.5)}, {"temperature": 1.0, "top_p": 0.5}),
        ({"allowed_token_ids": range(3)}, {"allowed_token_ids": (0, 1, 2)}),
    ],
    ids=str,
)
def test_p2_what_means_the_same_is_kept_the_same(fields, kept):
    made = SamplingParams(**fields)
    for field, value in kept.items():
        assert getattr(made, field) == value
        assert type(getattr(made, field)) is type(value)
    assert {
        type(item) for field in kept if isinstance(getattr(made, field), tuple) for item in getattr(made, field)
    } <= {
        str,
        int,
        tuple,
    }


@pytest.mark.parametrize("given", ["Never", np.array([1, 2]), np.True_, 1, None], ids=repr)
def test_p1_early_stopping_is_one_of_three(given):
    with pytest.raises(InvalidRequestError, match=r'^early_stopping must be True, False or "never", got ') as caught:
        BeamParams(width=2, early_stopping=given)
    assert caught.value.param == "early_stopping"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", True),
        ("max_num_seqs", 2.5),
        ("max_num_seqs", 10**12),
        ("kv_cache_memory_bytes", 10**30),
        ("block_size", 16.0),
        ("swap_space", "4"),
        ("watermark", float("nan")),
        ("enforce_eager", 1),
        ("served_model_name", [1]),
        ("model", None),
        ("seed", 1.5),
        ("dtype", None),
    ],
)
def test_p1_options_are_as_strict(field, value):
    for make in (Options, build.make_options):
        with pytest.raises(ConfigError, match=f"^{field} must be .*, got "):
            make(**{field: value})


def test_p2_options_keep_paths_as_texts_and_names_as_a_tuple():
    made = Options(model=Path("a/b"), tokenizer=Path("c"), served_model_name="mine", max_num_seqs=np.int32(4))
    assert (made.model, made.tokenizer, made.served_model_name) == ("a/b", "c", ("mine",))
    assert type(made.max_num_seqs) is int


@pytest.mark.parametrize(
    "prompt", [b"hi", [True], [1.5], 5, None, {1, 2}, {"a": 1}, ["a"], 3j, np.array(5), torch.tensor(5)], ids=repr
)
async def test_p2_a_prompt_is_a_text_or_token_ids(prompt):
    async with scripted_engine() as engine:
        with pytest.raises(
            InvalidRequestError, match=r"^prompt must be a text or a sequence of token ids, got "
        ) as caught:
            await engine.complete(prompt)
        assert caught.value.param == "prompt"
        ids = await engine.complete(np.array([72, 105], np.int32), SamplingParams(max_tokens=1))
        assert ids.prompt_token_ids == (72, 105)
        assert {type(token_id) for token_id in ids.prompt_token_ids} == {int}


@pytest.mark.parametrize("given", ["abc", b"abc", 5, None, [1.5], {5}, np.array(5), np.array([[5]])], ids=repr)
async def test_p2_what_is_decoded_are_token_ids(given):
    async with scripted_engine() as engine:
        with pytest.raises(InvalidRequestError, match=r"^tokens must be a sequence of at most \d+ token ids, got "):
            await engine.decode(given)
        for several in ([72, 105], (72, 105), np.array([72, 105]), torch.tensor([72, 105])):
            assert await engine.decode(several) == "Hi"
        assert await engine.decode(np.array([], np.int64)) == ""
        with pytest.raises(InvalidRequestError, match=r"^tokens: token id 1000000 is out of vocabulary"):
            await engine.decode(np.array([72, 10**6]))
        with pytest.raises(InvalidRequestError, match=r"^skip_special_tokens must be True or False, got 1"):
            await engine.decode([72], skip_special_tokens=1)


@pytest.mark.parametrize("given", [5, None, b"abc", ["abc"]], ids=repr)
async def test_p2_what_is_encoded_is_a_text(given):
    async with scripted_engine() as engine:
        with pytest.raises(InvalidRequestError, match=r"^text must be a string, got "):
            await engine.encode(given)
        for special in (1, "yes", None):
            with pytest.raises(InvalidRequestError, match=r"^add_special_tokens must be True or False, got ") as caught:
                await engine.encode("a", add_special_tokens=special)
            assert caught.value.param == "add_special_tokens"


TERMS = {
    "request_id": (5, "", "a b", "x" * 129, "é", True),
    "cache_salt": (5, None, "a@b", "x" * 129, "\ud800", b"a"),
    "priority": (1.5, None, True, 2**31, 10**400, "1"),
    "timeout_s": (0, -1, float("nan"), float("inf"), "1", True, 10**400),
}


@pytest.mark.parametrize("term", TERMS)
async def test_p2_terms_are_checked_as_over_http(term):
    async with scripted_engine() as engine:
        for value in TERMS[term]:
            with pytest.raises(InvalidRequestError, match=f"^{term} must be .*, got ") as caught:
                await engine.complete("hi", **{term: value})
            assert caught.value.param == term
        assert (await engine.complete("hi")).text == "Hello, world!"


async def test_p1_what_python_refuses_http_refuses_in_the_same_words():
    async with scripted_engine() as engine, client_of(create_app(engine)) as client:
        for field, value in (("repetition_penalty", 1e-38), ("top_k", 2**31), ("stop", ["a"] * 5), ("n", 0)):
            response = await client.post("/v1/completions", json={"prompt": "hi", field: value})
            with pytest.raises(InvalidRequestError) as caught:
                SamplingParams(**{field: value})
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["message"]) == (400, field, caught.value.message)


# P3: a chat's answer is a text of its own, however it is asked for


def sentencepiece_engine():
    """An engine whose model says " the dog" in SentencePiece's tokens."""
    tokenizer = sentencepiece()
    spelled = tokenizer.token_strings(range(tokenizer.vocab_size))
    script = [spelled.index("▁the"), spelled.index("▁dog")]

    def load(report):
        parts = scripted_loader(runner=ScriptedRunner(model=FakeScript(script)), max_model_len=512)(report)
        info = msgspec.structs.replace(parts.info, vocab_size=tokenizer.vocab_size)
        return EngineParts(info, parts.config, parts.scheduler, parts.runner, tokenizer, parts.chat_template)

    return Engine(load)


async def test_p3_chat_and_complete_chat_drop_the_space_before_the_first_word():
    two = SamplingParams(max_tokens=2)
    async with sentencepiece_engine() as engine:
        assert await text_of(engine.chat(HELLO, two)) == "the dog"
        assert (await engine.complete_chat(HELLO, two)).text == "the dog"
        assert (await engine.complete("the", two)).text == " the dog"
        prompt = await engine.encode_chat(HELLO)
        assert (await engine.complete_n(prompt, two, starts_text=True))[0].text == "the dog"


@pytest.mark.torch
def test_p3_llm_chat_drops_it_too(tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, **shape}
    write(
        tmp_path,
        sentencepiece_backend(),
        config__json=json.dumps({**llama, "max_position_embeddings": 512, "rms_norm_eps": 1e-5}),
        tokenizer_config__json=json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}),
    )
    the = sentencepiece_backend().token_to_id("▁the")
    only = SamplingParams(max_tokens=2, allowed_token_ids=[the])
    with LLM(tmp_path, load_format="dummy", device="cpu", kv_cache_memory_bytes=2**20) as llm:
        assert [answer.text for answer in llm.chat([HELLO, HELLO], only, use_tqdm=False)] == ["the the", "the the"]
        assert [answer.text for answer in llm.generate("the", only, use_tqdm=False)] == [" the the"]


# P4: errors that say what was wrong


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda e: e.complete("hi", SamplingParams(beam=4)), "beam must be BeamParams, got 4"),
        (lambda e: e.beam_search("hi", 4), "beam must be BeamParams, got 4"),
        (lambda e: e.complete("hi", {"n": 1}), r"params must be SamplingParams, got \{'n': 1\}"),
        (lambda e: e.complete_chat("hi"), "messages must be a sequence of messages, got 'hi'"),
        (lambda e: e.complete_chat(["hi"]), r"messages\[0\] must be a mapping with role and content, got 'hi'"),
        (lambda e: e.complete_chat([{"role": "user", "content": b"x"}]), r"content must be a string .*, got b'x'"),
        (lambda e: e.complete("hi", SamplingParams(n=2)), "n must be 1 .*, got 2: use complete_n"),
        (lambda e: e.complete_chat([], SamplingParams(n=2)), "n must be 1 .*, got 2: use complete_n"),
    ],
    ids=lambda value: f"P4-{value}" if isinstance(value, str) else "",
)
async def test_p4_what_cannot_be_is_said_in_a_line(ask, message):
    async with scripted_engine() as engine:
        with pytest.raises(InvalidRequestError, match=message):
            await ask(engine)


async def test_p4_an_engine_that_was_not_entered_says_how_to():
    with pytest.raises(UnavailableError, match="the engine is new: enter it first, with `async with`"):
        await scripted_engine().complete("hi")


# P6: names, help, types, reprs


def test_p6_every_public_name_is_exported_and_in_dir_and_typed():
    tree = ast.parse(Path(aserve.__file__).read_text())
    typed = {
        (alias.name, node.module)
        for branch in tree.body
        if isinstance(branch, ast.If)
        for node in branch.body
        for alias in node.names
    }
    assert typed == set(aserve._HOMES.items())
    assert {*aserve._HOMES, "__version__"} == set(aserve.__all__) == set(dir(aserve))
    for name in aserve.__all__:
        assert getattr(aserve, name) is not None
    every_error = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AserveError)
    }
    assert every_error <= set(aserve.__all__)


def test_p6_help_shows_every_public_class_with_its_docstring():
    text = pydoc.render_doc(aserve, renderer=pydoc.plaintext)
    for name in aserve.__all__:
        if isinstance(kind := getattr(aserve, name), type):
            assert f"    class {name}(" in text
            assert kind.__doc__
            assert kind.__doc__.splitlines()[0] in text


def test_p6_asking_for_names_loads_no_torch():
    program = "import sys, aserve; [getattr(aserve, name) for name in dir(aserve)]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_p6_options_as_keywords_are_the_options():
    hints = get_type_hints(OptionFields)
    assert list(hints) == [field for field in Options.__struct_fields__ if field != "model"]
    taken = {
        "served_model_name",
        "tokenizer",
        "chat_template",
        "download_dir",
        "lora_modules",
        "lora_root",
        "record",
        "speculative_config",
        "hf_overrides",
    }  # as which more is taken than is kept
    kept = get_type_hints(Options)
    assert {name for name, hint in hints.items() if hint != kept[name]} == taken
    tree = ast.parse(Path(config.__file__).read_text())
    (made,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assert made.args.kwarg is not None
    assert ast.unparse(made.args.kwarg.annotation) == "Unpack['OptionFields']"
    assert [argument.arg for argument in made.args.kwonlyargs] == ["model"]


@pytest.mark.parametrize(("module", "kind"), [(params, SamplingParams), (structured, StructuredOutputs)])
def test_p6_params_as_type_checkers_see_them_are_the_params(module, kind):
    tree = ast.parse(Path(module.__file__).read_text())
    (made,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    defaults = [ast.literal_eval(value) for value in made.args.kw_defaults]
    declared = dict(zip([argument.arg for argument in made.args.kwonlyargs], defaults, strict=True))
    assert declared == {field.name: field.default for field in msgspec.structs.fields(kind)}
    hints = {argument.arg: ast.unparse(argument.annotation) for argument in made.args.kwonlyargs}
    kept_as_tuples = {name for name, hint in get_type_hints(kind).items() if "tuple[" in str(hint)}
    assert {name for name, hint in hints.items() if "Sequence[" in hint} == kept_as_tuples


async def test_p6_reprs_say_what_matters():
    assert repr(SamplingParams(temperature=0.5, stop="END")) == "SamplingParams(temperature=0.5, stop=('END',))"
    assert repr(Options(max_num_seqs=3)) == "Options(max_num_seqs=3)"
    assert repr(BeamParams(width=2)) == "BeamParams(width=2)"
    long = Completion((1,) * 1000, "x" * 1000, (1,) * 1000, FinishReason.LENGTH)
    assert len(repr(long)) < 200
    assert "1000 tokens" in repr(long)
    engine = scripted_engine()
    assert repr(engine) == "<Engine new>"
    async with engine:
        assert repr(engine) == "<Engine 'scripted' ready>"
        async with engine.open("hi", request_id="mine") as mailbox:
            assert repr(mailbox) == "<Mailbox 'mine' choices open: 1>"
            assert isinstance(mailbox, Mailbox)
    assert repr(engine) == "<Engine closed>"


# P7: what was missing


async def test_p7_terms_reach_the_request_by_every_way_to_ask():
    runner = ScriptedRunner(model=FakeScript(b"endless"))
    clock = FakeClock(100.0)
    terms = {"request_id": "mine", "cache_salt": "salt", "priority": -3, "timeout_s": 2.5}
    short = SamplingParams(max_tokens=2)

    def ways(engine):
        return (
            (text_of(engine.generate("hi", short, **terms)), ("mine", b"salt", -3, 102.5)),
            (text_of(engine.chat(HELLO, short, **terms)), ("mine", b"salt", -3, 102.5)),
            (engine.complete("hi", short, **terms), ("mine", b"salt", -3, 102.5)),
            (engine.complete_chat(HELLO, short, **terms), ("mine", b"salt", -3, 102.5)),
            (engine.complete_n("hi", SamplingParams(n=2, max_tokens=2), **terms), ("mine", b"salt", -3, 102.5)),
            (engine.complete("hi", short), (None, b"", 0, None)),
        )

    seen = []
    async with Engine(scripted_loader(runner=runner), clock=clock) as engine:
        add = engine._parts.scheduler.add

        def spy(asked):
            seen.append((asked.id, asked.cache_salt, asked.priority, asked.deadline_s))
            add(asked)

        engine._parts.scheduler.add = spy
        for way, expected in ways(engine):
            await way
            identity, *rest = seen.pop()
            assert identity == (expected[0] or identity)
            assert tuple(rest) == expected[1:]
        with pytest.raises(TypeError, match="prio"):
            await engine.complete("hi", prio=3)


async def test_p7_branches_have_terms_of_their_own():
    own = {"cache_salt": "s", "priority": 4, "timeout_s": 1e6}
    async with scripted_engine(b"endless") as engine, engine.open("hi", ENDLESS, **own) as origin:
        await anext(origin)
        first = engine._loop.request(origin.request_id)
        async with engine.fork(origin, 2, request_ids=["a", "b"], priority=-1, timeout_s=9) as branches:
            assert [branch.request_id for branch in branches] == ["a", "b"]
            asked = engine._loop.request(branches[0].request_id)
            assert (asked.priority, asked.cache_salt) == (-1, b"s")
            assert asked.deadline_s == asked.arrival_s + 9
        async with engine.fork(origin, 1) as (branch,):
            asked = engine._loop.request(branch.request_id)
            assert (asked.priority, asked.deadline_s) == (4, first.deadline_s)
        with pytest.raises(InvalidRequestError, match=r"request_ids must be as many as the branches \(2\), got 1"):
            async with engine.fork(origin, 2, request_ids=["a"]):
                pass


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"branches": None}, "^branches must be a sequence of at most 65536 SamplingParams, or how many .*, got None"),
        ({"branches": ENDLESS}, "^branches must be .*, got SamplingParams"),
        ({"branches": -1}, "^branches must be .*, got -1"),
        ({"branches": True}, "^branches must be .*, got True"),
        ({"branches": 1.5}, "^branches must be .*, got 1.5"),
        ({"branches": "ab"}, "^branches must be .*, got 'ab'"),
        ({"branches": 2**16 + 1}, "^branches must be .*, got 65537"),
        ({"branches": [ENDLESS, 5]}, r"^branches\[1\] must be SamplingParams, got 5"),
        ({"request_ids": "ab"}, "^request_ids must be a sequence of texts, one for each branch, got 'ab'"),
        ({"request_ids": {"a", "b"}}, "^request_ids must be a sequence of texts, one for each branch, got "),
        ({"request_ids": iter("ab")}, "^request_ids must be a sequence of texts, one for each branch, got "),
        ({"request_ids": np.array("a")}, "^request_ids must be a sequence of texts, one for each branch, got "),
        ({"index": "0"}, "^index must be an integer in .*, got '0'"),
        ({"index": -1}, "^index must be in .*, got -1"),
        ({"index": 0.0}, "^index must be an integer in .*, got 0.0"),
    ],
)
async def test_p7_what_is_no_branch_is_said(asked, message):
    """Catches what asks for branches that nobody meant, and for none."""
    async with scripted_engine(b"endless") as engine, engine.open("hi", ENDLESS) as origin:
        await anext(origin)
        with pytest.raises(InvalidRequestError, match=message):
            async with engine.fork(origin, **{"branches": 2, **asked}):
                pass
        assert engine.statistics().num_running == 1


@pytest.mark.parametrize(
    "branches", [np.int64(2), [ENDLESS, ENDLESS], (ENDLESS, ENDLESS)], ids=lambda given: type(given)
)
async def test_p7_branches_are_counted_by_numpy_too(branches):
    async with scripted_engine(b"endless") as engine, engine.open("hi", ENDLESS) as origin:
        await anext(origin)
        ids = np.array(["a", "b"])
        async with engine.fork(origin, branches, index=np.int64(0), request_ids=ids) as found:
            assert [branch.request_id for branch in found] == ["a", "b"]
        async with engine.fork(origin, 0) as found:
            assert found == []


@pytest.mark.parametrize("n", [1, 3])
async def test_p7_an_aborted_request_ends_with_what_it_has(n):
    async with scripted_engine(b"endless") as engine:
        asked = SamplingParams(temperature=0.0, ignore_eos=True, n=n, stop="zz")
        reader = asyncio.create_task(engine.complete_n("hi", asked, request_id="mine"))
        neighbour = asyncio.create_task(engine.complete("hi", SamplingParams(max_tokens=60)))
        assert engine.abort("mine") is False  # it has not been taken yet
        await until(lambda: engine.statistics().num_running > n)
        assert engine.abort("mine") is True
        assert engine.abort("mine") is False
        answers = await reader
        assert [answer.finish_reason for answer in answers] == [FinishReason.ABORT] * n
        for answer in answers:
            assert "endless".startswith(answer.text[:7])
            assert len(answer.text) == len(answer.token_ids)
        assert engine.abort("nobody") is False
        assert (await neighbour).text == ("endless" * 9)[:60]
        assert engine.statistics().num_used_blocks == 0
        count = {"model_name": "scripted", "finished_reason": "abort"}
        assert engine.registry.get_sample_value("aserve_request_success_total", count) == 1
    assert engine.abort("mine") is False


@pytest.mark.parametrize("ranked", [{"best_of": 3}, {"beam": BeamParams(width=3)}], ids=["best_of", "beams"])
async def test_p7_of_what_is_ranked_the_best_so_far_is_what_it_has(ranked):
    async with scripted_engine(b"endless") as engine:
        asked = SamplingParams(ignore_eos=True, n=2, **ranked)
        reader = asyncio.create_task(engine.complete_n("hi", asked, request_id="mine"))
        await until(lambda: engine.statistics().num_steps_by_tokens.get(3, 0) > 3)
        assert engine.abort("mine") is True
        answers = await reader
        assert [answer.finish_reason for answer in answers] == [FinishReason.ABORT] * 2
        assert [answer.stop_reason for answer in answers] == [None] * 2
        assert len(answers[0].token_ids) > 1
        assert answers[0].cumulative_logprob >= answers[1].cumulative_logprob
        assert engine.statistics().num_used_blocks == 0
        count = {"model_name": "scripted", "finished_reason": "abort"}
        assert engine.registry.get_sample_value("aserve_request_success_total", count) == 1


async def test_p7_what_is_ranked_and_waits_is_aborted_without_a_token():
    async with scripted_engine(b"endless", max_num_seqs=3) as engine, engine.open("hi", ENDLESS):
        await until(lambda: engine.statistics().num_running == 1)
        async with engine.open("hi", msgspec.structs.replace(ENDLESS, n=3)):
            await until(lambda: engine.statistics().num_running == 3)
            asked = SamplingParams(n=2, beam=BeamParams(width=3))
            waiting = asyncio.create_task(engine.complete_n("hi", asked, request_id="w"))
            await until(lambda: engine.statistics().num_waiting == 4)
            assert engine.abort("w") is True
            answers = await waiting
            assert [(answer.text, answer.finish_reason) for answer in answers] == [("", FinishReason.ABORT)] * 2


async def test_p7_a_request_is_found_by_a_member_of_an_enum_whose_value_is_its_id():
    """Catches a look-up by the member itself, whose hash is that of its name."""
    mine = Enum("Id", {"MINE": "mine"}, type=str).MINE
    async with scripted_engine(b"endless") as engine:
        async with engine.open("hi", ENDLESS, request_id=mine, explain=True) as mailbox:
            await anext(mailbox)
            assert engine.explanation(mine) is not None
            assert engine.abort(mine) is True
        with pytest.raises(InvalidRequestError, match=r"^request_id must be a string, got \['mine'\]"):
            engine.abort(["mine"])


async def test_p7_one_that_waits_is_aborted_without_a_token():
    async with scripted_engine(b"endless", max_num_seqs=1) as engine, engine.open("hi", ENDLESS):
        await until(lambda: engine.statistics().num_running == 1)
        waiting = asyncio.create_task(engine.complete("hi", ENDLESS, request_id="w"))
        await until(lambda: engine.statistics().num_waiting == 1)
        assert engine.abort("w") is True
        answer = await waiting
        assert (answer.text, answer.finish_reason) == ("", FinishReason.ABORT)
        assert answer.timings.first_token_s is None
        assert engine.statistics().num_waiting == 0


async def test_p7_an_answer_says_how_long_it_took():
    clock = FakeClock(50.0)
    runner = ScriptedRunner(model=FakeKV(8, range(97, 123)))
    short = SamplingParams(max_tokens=3)
    async with Engine(scripted_loader(runner=runner, max_num_seqs=2), clock=clock) as engine:
        runner.hold()
        first = asyncio.create_task(engine.complete_n("hi", SamplingParams(max_tokens=3, n=2)))
        await until(lambda: engine.statistics().num_running == 2)
        second = asyncio.create_task(engine.complete("hi", SamplingParams(max_tokens=3, best_of=2)))
        await until(lambda: engine.statistics().num_waiting == 2)
        clock.advance(4.0)
        runner.let_land()
        assert [answer.timings for answer in await first] == [RequestTimings(0.0, 4.0, 4.0)] * 2
        assert (await second).timings == RequestTimings(4.0, 4.0, 4.0)
        beams = await engine.beam_search("hi", BeamParams(width=2), max_tokens=2)
        assert beams[0].timings == RequestTimings(0.0, 0.0, 0.0)
        deltas = [delta async for delta in engine.generate("hi", short)]
        assert [delta.timings is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
        runner.hold()
        later = asyncio.create_task(engine.complete("hi", short))
        await until(lambda: engine.statistics().num_running == 1)
        clock.advance(1.0)
        runner.let_land()
        assert await later == (await engine.complete("hi", short)), "whatever the times"


# F2: every request that is taken can be answered, whatever its numbers, and those beside it are not told of them


@pytest.mark.torch
async def test_f2_extreme_numbers_alter_no_neighbour():
    extremes = (
        SamplingParams(repetition_penalty=0.01, top_p=0.5, max_tokens=12),
        SamplingParams(repetition_penalty=100.0, temperature=2.0, min_p=1.0, max_tokens=12),
        SamplingParams(temperature=1e-5, top_p=1e-300, presence_penalty=-2, frequency_penalty=-2, max_tokens=12),
        SamplingParams(logit_bias={5: 1e300, 6: -1e300}, top_k=1, min_p=1e-300, max_tokens=12),
    )
    with pytest.raises(InvalidRequestError, match=r"repetition_penalty must be in \[0.01, 100\], got 1e-38"):
        SamplingParams(repetition_penalty=1e-38)
    calm = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True)
    async with build.AsyncEngine("demo", device="cpu", dtype="float32", kv_cache_memory_bytes=2**23) as engine:
        alone = await engine.complete("What is aserve?", calm)
        together = await asyncio.gather(
            *(engine.complete("What is aserve?", each) for each in (*extremes, calm, *extremes, calm))
        )
        assert all(answer.token_ids for answer in together)
        assert together[4] == alone == together[9]

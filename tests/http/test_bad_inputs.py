"""What hostile and careless clients send. Expected each time: a 400 that names the field, and a server that is well."""

import json
import time
from functools import partial

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.http.body import (
    LONG_DIGITS,
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_FIELD_BYTES,
    MAX_FIELDS,
    MAX_LONG_DIGITS,
    MAX_OTHER_VALUES,
    MAX_REALS,
    MAX_STRINGS,
    MAX_VALUES,
    PIECE_BYTES,
    at_nothing,
    check_amount,
    outside_strings,
    read_object,
)
from aserve.http.openai.chat import ChatFields
from aserve.http.openai.fields import NEUTRAL, UNSUPPORTED, WITHOUT_EFFECT
from aserve.http.openai.schema import GenerationFields
from aserve.workers import Workers

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, TEXT: {"prompt": "hi"}}
BOTH = pytest.mark.parametrize("url", [CHAT, TEXT], ids=["chat", "text"])
JSON = {"content-type": "application/json"}


def error_of(response: httpx.Response, status=400) -> dict:
    """The error object, whose shape and harmlessness are checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 300
    assert all(" " <= character <= "~" for character in error["message"])
    return error


async def refused(client, url, fields, param):
    """Refused with this param, streamed or not; afterwards a good request is answered."""
    for stream in (False, True):
        error = error_of(
            await client.post(url, content=json.dumps({**BODIES[url], "stream": stream, **fields}), headers=JSON)
        )
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
    assert (await client.post(url, json=BODIES[url])).status_code == 200


@BOTH
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b'"x"', b"42", b"null", b"true", b"{", b'{"a":}', b"{} {}", b"\xff", b'{"prompt":"\xff"}'),
        *(b'{"prompt":"\xc0\xaf"}', b'{"prompt":"\\ud800"}', b'{"prompt":"\\udc00x"}', b'{"temperature":NaN}'),
        *(b'{"temperature":Infinity}', b'{"temperature":1e400}', b'{"seed":' + b"9" * 5_000 + b"}"),
        *(b'{"prompt":' + b"[" * 100_000, b'{"a":' * 100_000, b"\xef\xbb\xbf{}"),
    ],
    ids=lambda body: repr(body[:24]),
)
async def test_bodies_that_are_no_json_object(client, url, body):
    error_of(await client.post(url, content=body, headers=JSON))
    assert (await client.post(url, json=BODIES[url])).status_code == 200


async def test_malformed_json_is_told_with_its_position(client):
    error = error_of(await client.post(TEXT, content=b'{"prompt": oops}', headers=JSON))
    assert "byte 11" in error["message"]


@pytest.mark.parametrize(
    "value", [b"[" + b"[]," * MAX_CONTAINERS + b"[]]", b'{"a":' * (MAX_CONTAINERS + 1), b"[" * (MAX_CONTAINERS + 1)]
)
async def test_a_body_of_too_many_arrays_and_objects_is_refused_before_it_is_decoded(client, value):
    error = error_of(await client.post(TEXT, content=b'{"prompt":' + value, headers=JSON))
    assert f"more than {MAX_CONTAINERS} arrays and objects" in error["message"]


@given(
    st.recursive(
        st.none() | st.integers() | st.text(alphabet='[,{"\\nü'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='[,{"\\'), inner),
        max_leaves=20,
    )
)
def test_what_is_within_strings_is_not_counted(value):
    def without_strings(part):
        if isinstance(part, dict):
            return "{" + ", ".join(f'"": {without_strings(member)}' for member in part.values()) + "}"
        if isinstance(part, list):
            return "[" + ", ".join(map(without_strings, part)) + "]"
        return '""' if isinstance(part, str) else json.dumps(part)

    for ensure_ascii in (True, False):
        body = json.dumps(value, ensure_ascii=ensure_ascii).encode()
        assert outside_strings(body) == without_strings(value).encode()


@pytest.mark.parametrize(
    "lengths",
    [[PIECE_BYTES], [1000] * 300, [0, 700, 5000] * 100, [PIECE_BYTES, *[1] * 20_000], [0] * 300 + [PIECE_BYTES]],
    ids=["one", "long", "mixed", "first a long one", "last a long one"],
)
def test_it_does_not_matter_how_long_strings_are(lengths):
    """Long ones are skipped, short ones are cut out; a body may begin with the ones and go on with the others."""
    texts = [b"[{,:}]1"[:length] * (length // 7 + 1) for length in lengths]
    body = b"[%b" % b" ,".join(b'"%b"' % text for text in texts)
    assert outside_strings(body + b" ]") == b"[%b ]" % b" ,".join([b'""'] * len(texts))
    assert outside_strings(body + b' ,"[' + b"a" * PIECE_BYTES) == b"[%b ," % b" ,".join([b'""'] * len(texts))


@pytest.mark.parametrize("end", [b"\\\\", b'\\"', b'\\\\\\"'])
def test_escapes_are_whole_where_a_long_body_is_cut(end):
    for before in range(PIECE_BYTES - 6, PIECE_BYTES + 2):
        body = b'{"k":"' + b"a" * before + end * 3 + b'","l":[1]}'
        assert json.loads(body)["l"] == [1]
        assert outside_strings(body) == b'{"":"","":[1]}'


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b'{"p":{' + b",".join(b'"%d":1' % i for i in range(MAX_STRINGS + 1)) + b"}}", "strings and keys"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(MAX_STRINGS + 1)) + b"}", "strings and keys"),
        (b"{" + b",".join(b'"%d":1' % i for i in range(MAX_FIELDS + 1)) + b"}", "fields"),
        (b'{"p":[' + b'"",' * MAX_STRINGS + b'""]}', "strings and keys"),
        (b'{"p":[' + b"1e-300," * MAX_REALS + b"1e-300]}", "fractions"),
        (b'{"p":[' + b"1." * MAX_REALS + b"1.]}", "fractions"),
        (b'{"p":[' + (b"9" * LONG_DIGITS * 100 + b",") * (MAX_LONG_DIGITS // 100 + 1) + b"1]}", "digits in a row"),
        (b'{"p":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "levels deep"),
        (b'{"p":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "levels deep"),
        (b'{"stop_token_ids":[1,' + b"1," * MAX_OTHER_VALUES + b"1]}", "values besides token ids"),
        (b'{"messages":[1,' + b"1," * MAX_OTHER_VALUES + b"1]}", "values besides token ids"),
        (b'{"prompt":[1,1],"input":["a",' + b"1," * MAX_OTHER_VALUES + b"1]}", "values besides token ids"),
        (b'{"stop_token_ids":[' + b"1," * (MAX_FIELD_BYTES // 2) + b"1]}", "longer than"),
    ],
    ids=lambda value: repr(value[:12]),
)
async def test_bodies_that_would_take_long_are_refused(client, value, words):
    error = error_of(await client.post(TEXT, content=value, headers=JSON))
    assert words in error["message"]


def test_nothing_takes_long_of_what_is_within_the_bounds():
    """What a body of each kind costs at its bound, in one call of the library that nothing interrupts."""
    bodies = [
        b"[" + b'"abcd",' * (MAX_STRINGS - 1) + b"1]",
        b"[" + b"[]," * (MAX_CONTAINERS - 1) + b"1]",
        b"[" + b"1.7976931348623157e-300," * (MAX_REALS // 2) + b"1]",
        b"[" + (b"9" * 4200 + b",") * (MAX_LONG_DIGITS * LONG_DIGITS // 4200) + b"1]",
        b"[" + b"12345," * (PIECE_BYTES // 6) + b"1]",
        b"{" + b",".join(b'"%08d":1' % n for n in range(MAX_STRINGS)) + b"}",
    ]
    for body in bodies:
        check_amount(outside_strings(body))
        best_s = min(_cpu_s(partial(msgspec.json.decode, body)) for _ in range(3))
        assert best_s < 0.05, body[:20]


def _cpu_s(work):
    start_s = time.thread_time()
    work()
    return time.thread_time() - start_s


@pytest.mark.parametrize("num", [1, 20_000, 300_000])
@pytest.mark.parametrize("separator", [b",", b", ", b" ,\n"])
async def test_a_long_list_of_numbers_is_decoded_piece_by_piece_to_the_same(num, separator):
    body = b'{"prompt":[' + separator.join(b"%d" % n for n in range(num)) + b'],"n":2}'

    async def receive():
        return {"type": "http.request", "body": body}

    workers = Workers()
    found = await read_object({"headers": []}, receive, workers, at_nothing)
    workers.close()
    assert found.fields == json.loads(body)


async def test_a_body_of_legitimate_size_is_taken(client):
    for prompt in (list(range(100)) * 10_000, "word " * 600_000, "1,2," * MAX_OTHER_VALUES):
        error = error_of(await client.post(TEXT, json={"prompt": prompt}))
        assert error["code"] == "context_length_exceeded"
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 2000
    assert error_of(await client.post(CHAT, json={"messages": messages}))["code"] == "context_length_exceeded"


async def test_a_body_of_too_many_numbers_is_refused(client):
    error = error_of(
        await client.post(TEXT, content=b'{"prompt":[[' + b"1," * (MAX_VALUES + 1) + b"1]]}", headers=JSON)
    )
    assert f"{MAX_VALUES} values" in error["message"]


@pytest.mark.parametrize(
    ("url", "content", "param", "message"),
    [
        (CHAT, b'{"messages":[%b]}' % b",".join([b'{"role":"user","content":"a"}'] * 2049), "messages", "<= 2048"),
        (TEXT, b'{"prompt":[%b]}' % b",".join([b"[" + b"1," * 99 + b"1]"] * 2700), "prompt", "at most 262144"),
        (TEXT, b'{"prompt":[%b"a"]}' % (b"[%b1]," % (b"1," * 99) * 1000), "prompt", "a list of either"),
        (TEXT, b'{"prompt":"%b"}' % (b"\\n" * 1_048_577), None, "more than 1048576 escapes"),
    ],
    ids=["messages", "ids of several prompts", "ids and a text", "escapes"],
)
async def test_of_what_a_large_body_may_hold_only_so_much(client, url, content, param, message):
    """Catches a bound that is looked at under another name, or only once all has been decoded."""
    error = error_of(await client.post(url, content=content, headers=JSON))
    assert error["param"] == param
    assert message in error["message"]


async def test_of_equal_keys_the_last_wins(client):
    response = await client.post(TEXT, content=b'{"prompt":"a","prompt":"bcd"}', headers=JSON)
    assert response.json()["usage"]["prompt_tokens"] == 3


@BOTH
@pytest.mark.parametrize(
    "headers",
    [
        *(
            {"content-type": kind}
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
        ),
        {**JSON, "content-encoding": "gzip"},
    ],
    ids=str,
)
async def test_bodies_that_do_not_call_themselves_json(client, url, headers):
    response = await client.post(url, content=json.dumps(BODIES[url]), headers=headers)
    assert error_of(response, 415)["code"] == "unsupported_media_type"


async def test_a_large_body_is_parsed_all_the_same(client):
    error = error_of(await client.post(TEXT, json={"prompt": "x" * 300_000}))
    assert error["code"] == "context_length_exceeded"


@BOTH
@pytest.mark.parametrize(
    ("field", "values"),
    {
        "max_tokens": (0, -1, 2**63, 10**30, "1", 1.0, True, [1]),
        "max_completion_tokens": (0, -1, "1", 1.5, False),
        "temperature": (-0.1, 2.1, 10**30, 10**4000, "1", True, [], {}),
        "top_p": (0, 1.1, -0.1, "x", True),
        "top_k": (-2, 2**31, 10**30, 1.0, "1", True),
        "min_p": (-0.1, 2, "x"),
        "seed": (2**64, -(2**64), 10**4000, 1.5, "1", True),
        "stop": ("", [""], ["a"] * 5, ["a"] * 5_000, "x" * 20_000, 1, [1], {}),
        "stop_token_ids": ([-1], [260], [2**31], [10**30], [1.0], [True], [0] * 129, 5, "5", [[5]]),
        "ignore_eos": (1, "true", []),
        "min_tokens": (-1, 2**31, 1.0, True),
        "return_token_ids": (1, "yes"),
        "presence_penalty": (-2.1, 2.1, "1", True),
        "frequency_penalty": (-2.1, 2.1, [], True),
        "repetition_penalty": (0, -1, 101, "x"),
        "logit_bias": (
            *({"a": 1}, {"-1": 1}, {"260": 1}, {"5": "1"}, {"5": None}, {" 5": 1}, {"5.0": 1}, [[5, 1]], 5),
            *({str(i): 1 for i in range(2000)}, {"9" * 5000: 1}),
        ),
        "allowed_token_ids": ([], [260], [-1], ["5"], 5, [10**30]),
        "bad_words": ([""], ["x"] * 129, ["x" * 257], "x", [5]),
        "prompt_logprobs": (-1, -2, 21, "1", True, 1.0),
        "logprob_token_ids": ([5], [260], [-1], ["5"], 5, [1] * 129),
        "include_stop_str_in_output": (1, "x"),
        "skip_special_tokens": (0, "x"),
        "add_special_tokens": (0, "x"),
        "truncate_prompt_tokens": (-2, "5", 5.0, True),
        "truncation_side": ("middle", 1, ""),
        "cache_salt": ("", "x" * 129, "a/b", "a@b", "a\\b", "a\0b", 5),
        "priority": (2**31, "1", 1.5, True),
        "request_id": ("", "a b", "a\nb", "x" * 129, "é", 5),
        "return_tokens_as_token_ids": (1,),
        "echo": (1, "x"),
        "n": (0, -1, 129, 5_000_000, "1", 1.0, True),
        "best_of": (0, 129, "1", True),
        "length_penalty": (2.0, "1", True),
        "early_stopping": (True, "always", 1),
        "model": (1, "x" * 1_000_000, ["scripted"]),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_values_out_of_bounds_and_of_the_wrong_type(client, url, field, values):
    for value in values:
        await refused(client, url, {field: value}, field)


@BOTH
async def test_stream_and_its_options(client, url):
    for fields, param in [
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"stream": True, "stream_options": []}, "stream_options"),
    ]:
        assert error_of(await client.post(url, json={**BODIES[url], **fields}))["param"] == param
    options = {"include_usage": False, "continuous_usage_stats": False}
    assert (await client.post(url, json={**BODIES[url], "stream": True, "stream_options": options})).status_code == 200


@BOTH
async def test_min_tokens_over_max_tokens(client, url):
    await refused(client, url, {"max_tokens": 5, "min_tokens": 6}, "min_tokens")


@BOTH
async def test_null_is_the_same_as_leaving_a_field_out(client, url):
    names = {*GenerationFields.__struct_fields__, *WITHOUT_EFFECT, *NEUTRAL, *UNSUPPORTED}
    response = await client.post(url, json={**BODIES[url], **dict.fromkeys(names)})
    assert response.status_code == 200, response.text


@BOTH
@pytest.mark.parametrize("name", sorted([*NEUTRAL, *UNSUPPORTED]))
async def test_a_field_that_does_not_work_yet_is_refused_and_its_neutral_value_is_not(client, url, name):
    if url == CHAT and name in ChatFields.__struct_fields__:
        return  # it is text completions that have no such field
    error = error_of(await client.post(url, json={**BODIES[url], name: {"some": "thing"}}))
    assert (error["param"], error["message"]) == (name, f"{name} is not supported yet")
    for value in NEUTRAL.get(name, ()):
        assert (await client.post(url, json={**BODIES[url], name: value})).status_code == 200


@BOTH
async def test_one_is_not_true(client, url):
    for fields in ({"n": True}, {"n": 1.0}, {"n": "1"}, {"echo": 0}, {"top_logprobs": False}):
        await refused(client, url, fields, next(iter(fields)))


@BOTH
@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
async def test_a_field_without_effect_is_taken_up_to_a_size(client, url, name):
    assert (await client.post(url, json={**BODIES[url], name: "x"})).status_code == 200
    await refused(client, url, {name: "x" * 20_000}, name)
    await refused(client, url, {name: {str(i): i for i in range(2_000)}}, name)


@BOTH
async def test_unknown_fields(client, url):
    error = error_of(await client.post(url, json={**BODIES[url], "temprature": 1}))
    assert error["param"] == "temprature"
    assert "did you mean temperature?" in error["message"]
    for name in ("é\n", "x" * 100_000, "", "\0"):
        error = error_of(await client.post(url, json={**BODIES[url], name: 1}))
        assert len(error["param"] or "") <= 80
    error_of(await client.post(url, json={**BODIES[url], **{f"k{i}": i for i in range(10_000)}}))


@pytest.mark.parametrize(
    "messages",
    [
        *(None, [], "hi", {}, [1], [None], [[]], [{}], [{"content": "hi"}], [{"role": "root", "content": "hi"}]),
        *([{"role": 1, "content": "hi"}], [{"role": "user"}], [{"role": "user", "content": None}]),
        *(
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": [5]}],
        ),
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254\\@x"}}]}],
        *([{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "x" * 10_000}]}]),
        *([{"role": "user", "content": "hi", "contents": "x"}], [{"role": "x" * 1_000_000, "content": ""}]),
        [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}],
    ],
    ids=lambda messages: repr(messages)[:40],
)
async def test_bad_messages(client, messages):
    await refused(client, CHAT, {"messages": messages}, "messages")


async def test_messages_may_carry_what_answers_had(client):
    answer = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": []}
    body = {"messages": [*BODIES[CHAT]["messages"], answer, *BODIES[CHAT]["messages"]]}
    assert (await client.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, "", [], [[]], [""], {}, 5, True, [None], [True], [-1], [260], [2**31], [10**30], [1.0], [1, "a"]),
        *(["a", 1], [[1], "a"], [[[1]]], [[1, -1]], [[1.0]], "x" * 200, [1] * 128, ["a"] * 1_025, [[1]] * 2_000),
    ],
    ids=lambda prompt: repr(prompt)[:40],
)
async def test_bad_prompts(client, prompt):
    await refused(client, TEXT, {"prompt": prompt}, "prompt")


async def test_what_is_missing_is_named(client):
    for url, field in [(CHAT, "messages"), (TEXT, "prompt"), ("/detokenize", "tokens"), ("/tokenize", "prompt")]:
        assert error_of(await client.post(url, json={}))["param"] == field


@BOTH
@pytest.mark.parametrize("name", ["other", "", "../../etc/passwd", "/etc/passwd", "%2e", "\0", "a\nb", "é" * 200])
async def test_models_that_are_not_served(client, url, name):
    error = error_of(await client.post(url, json={**BODIES[url], "model": name}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (b'{"prompt": "hi", "temperature": 1e400}', "temperature", "'temperature' has a number that is out of range"),
        (b'{"prompt": "hi", "x": {"y": [1, %b]}}' % (b"9" * 5000), "x", "'x' has a number that is out of range"),
        (b'[{"prompt": 1e400}]', None, "the body must be a JSON object"),
        (b'{"prompt": "hi \\ud83d"}', None, "the body has half of a surrogate pair, \\ud83d"),
        (b'{"prompt": "hi \\ud83d\\ude00', None, "Input data was truncated"),
    ],
    ids=["a number", "an integer", "no object", "half a pair", "cut"],
)
async def test_what_json_has_and_nobody_can_hold_is_told_as_that(client, body, param, message):
    error = error_of(await client.post(TEXT, content=body, headers=JSON))
    assert (error["param"], error["message"]) == (param, message)

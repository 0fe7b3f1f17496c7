"""Log-probabilities on the wire, as both APIs spell them: whole and streamed, of answers and of prompts."""

import pytest

from aserve.http import create_app
from aserve.http.openai.logprobs import CompletionLogprobs, Speller
from tests.engines import EOS, scripted_engine
from tests.fakes import FakeKV, ScriptedRunner, continuation, scores_of
from tests.http.conftest import client_of
from tests.http.events import events_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LETTERS = range(ord("a"), ord("z") + 1)
HI = [{"role": "user", "content": "hi"}]
CHAT_IDS = [258, *b"hi", EOS, 259]


@pytest.fixture
async def client():
    """Of an engine that says letters and scores them."""
    runner = ScriptedRunner(model=FakeKV(8, LETTERS))
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        yield client


def scored(prompt_ids, num_tokens, num_top):
    """The answer's tokens and their scores."""
    tokens = continuation(prompt_ids, num_tokens, vocabulary=LETTERS)
    contexts = [[*prompt_ids, *tokens[:i]] for i in range(num_tokens)]
    return tokens, [
        scores_of([(p, t, 0) for p, t in enumerate(context)], LETTERS, token, num_top)
        for context, token in zip(contexts, tokens, strict=True)
    ]


def chat_entry(token_id, logprob):
    return {"token": chr(token_id), "logprob": pytest.approx(logprob), "bytes": [token_id]}


@pytest.mark.parametrize("num_top", [0, 3])
async def test_chat(client, num_top):
    tokens, scores = scored(CHAT_IDS, 4, num_top)
    expected = [
        chat_entry(score.token_id, score.logprob)
        | {"top_logprobs": [chat_entry(*top) for top in zip(score.top_ids, score.top_logprobs, strict=True)]}
        for score in scores
    ]
    body = {"messages": HI, "max_tokens": 4, "logprobs": True, "top_logprobs": num_top}
    [choice] = (await client.post(CHAT, json=body)).json()["choices"]
    assert choice["message"]["content"] == bytes(tokens).decode()
    assert choice["logprobs"] == {"content": expected}
    first, *chunks = events_of((await client.post(CHAT, json={**body, "stream": True})).text)
    assert first["choices"][0]["logprobs"] is None
    assert [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]] == expected


async def test_tokens_that_are_named_are_scored_in_place_of_the_likeliest(client):
    """Whole and streamed, in both APIs; catches the likeliest in their place, and ids that are not looked at."""
    named = [ord("q"), ord("e")]
    _, likeliest = scored(CHAT_IDS, 3, 26)
    by_id = [dict(zip(score.top_ids, score.top_logprobs, strict=True)) for score in likeliest]
    body = {"messages": HI, "max_tokens": 3, "logprobs": True, "top_logprobs": 3, "logprob_token_ids": named}
    [choice] = (await client.post(CHAT, json=body)).json()["choices"]
    tops = [entry["top_logprobs"] for entry in choice["logprobs"]["content"]]
    assert tops == [[chat_entry(token_id, logprobs[token_id]) for token_id in named] for logprobs in by_id]
    _, *chunks = events_of((await client.post(CHAT, json={**body, "stream": True})).text)
    streamed = [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert streamed == choice["logprobs"]["content"]
    body = {"prompt": "hi", "max_tokens": 2, "logprobs": 1, "logprob_token_ids": named}
    [choice] = (await client.post(TEXT, json=body)).json()["choices"]
    for token, top in zip(choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True):
        assert set(top) == {"q", "e", token}
    for without in ({"prompt": "hi", "logprob_token_ids": named}, {**body, "max_tokens": 0, "echo": True}):
        error = (await client.post(TEXT, json=without)).json()["error"]
        assert error["param"] == "logprob_token_ids", error


async def test_all_tokens_are_scored_where_the_operator_lets_them():
    runner = ScriptedRunner(model=FakeKV(8, LETTERS))
    engine = scripted_engine(runner=runner, max_logprobs=260, max_model_len=2**17)
    async with engine, client_of(create_app(engine)) as client:
        body = {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": -1}
        [choice] = (await client.post(CHAT, json=body)).json()["choices"]
        tops = [{top["token"] for top in entry["top_logprobs"]} for entry in choice["logprobs"]["content"]]
        assert tops == [set(map(chr, LETTERS))] * 2
        body = {"prompt": "hi", "max_tokens": 1, "prompt_logprobs": -1}
        [choice] = (await client.post(TEXT, json=body)).json()["choices"]
        assert len(choice["prompt_logprobs"][1]) == len(LETTERS)
        too_much = await client.post(TEXT, json={"prompt": "hi", "max_tokens": 2**17, "logprobs": -1})
        error = too_much.json()["error"]
        assert (too_much.status_code, error["param"]) == (400, "logprobs")
        assert "more than 16777216 scores" in error["message"]


async def test_chat_without_logprobs_has_none(client):
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
        [choice] = (await client.post(CHAT, json={"messages": HI, "max_tokens": 2, **fields})).json()["choices"]
        assert choice["logprobs"] is None


@pytest.mark.parametrize("num_top", [0, 2])
async def test_completions(client, num_top):
    tokens, scores = scored([*b"hi"], 4, num_top)
    body = {"prompt": "hi", "max_tokens": 4, "logprobs": num_top}
    [choice] = (await client.post(TEXT, json=body)).json()["choices"]
    tops = [
        dict(zip(map(chr, score.top_ids), score.top_logprobs, strict=True)) | {chr(score.token_id): score.logprob}
        for score in scores
    ]
    assert choice["logprobs"] == {
        "tokens": [chr(token) for token in tokens],
        "token_logprobs": pytest.approx([score.logprob for score in scores]),
        "top_logprobs": [pytest.approx(top) for top in tops],
        "text_offset": [0, 1, 2, 3],
    }
    assert [next(iter(top)) for top in choice["logprobs"]["top_logprobs"]] == choice["logprobs"]["tokens"]
    chunks = events_of((await client.post(TEXT, json={**body, "stream": True})).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [item for part in parts for item in part[name]] for name in parts[0]} == choice["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_echo_scores_the_prompt_too(client, stream, max_tokens):
    prompt, (tokens, _) = "whatis", scored([*b"whatis"], max_tokens, 0)
    body = {"prompt": [prompt, "x"], "max_tokens": max_tokens, "logprobs": 1, "echo": True, "stream": stream}
    response = await client.post(TEXT, json=body)
    if stream:
        choices = [event["choices"][0] for event in events_of(response.text)]
        mine = [choice for choice in choices if choice["index"] == 0]
        text = "".join(choice["text"] for choice in mine)
        names = mine[0]["logprobs"]
        logprobs = {name: [item for choice in mine for item in choice["logprobs"][name]] for name in names}
        finish_reason = mine[-1]["finish_reason"]
    else:
        answer = response.json()
        choice = answer["choices"][0]
        text, logprobs, finish_reason = choice["text"], choice["logprobs"], choice["finish_reason"]
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens
        assert answer["choices"][1]["logprobs"]["token_logprobs"][0] is None
    assert text == prompt + bytes(tokens).decode()
    assert finish_reason == "length"
    assert logprobs["tokens"] == list(text)
    assert logprobs["text_offset"] == list(range(len(text)))
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert logprobs["token_logprobs"][1] == pytest.approx(scores_of([(0, ord("w"), 0)], LETTERS, ord("h"), 1).logprob)
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(text)
    assert all(logprob <= 0 for logprob in logprobs["token_logprobs"][1:])


@pytest.mark.parametrize("prompt", ["a<|end|>b", [97, EOS, 98]])
async def test_an_echo_has_the_special_tokens_of_its_prompt(prompt):
    """As ids they are spelled out, too, and text_offset says where each token begins in the text."""
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 0, "echo": True}
    runner = ScriptedRunner(model=FakeKV(8, range(260)))
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        [choice] = (await client.post(TEXT, json=body)).json()["choices"]
    assert choice["text"][:9] == "a<|end|>b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 8, 9]


async def test_what_a_tokenizer_puts_around_a_text_takes_no_room_in_it():
    async with scripted_engine() as engine:
        logprobs = CompletionLogprobs(Speller(engine, as_ids=False, skip_special_tokens=True))
        assert logprobs.prompt([258, 104, 105, EOS], [None] * 4, "hi")["text_offset"] == [0, 0, 1, 2]
        assert logprobs.part([104], ())["text_offset"] == [2]


async def test_prompt_logprobs(client):
    body = {"prompt": "abc", "max_tokens": 1, "prompt_logprobs": 2}
    [choice] = (await client.post(TEXT, json=body)).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for place, entry in enumerate(others, start=1):
        context = [(p, t, 0) for p, t in enumerate(b"abc"[:place])]
        score = scores_of(context, LETTERS, b"abc"[place], 2)
        assert entry[str(score.token_id)]["rank"] == score.rank
        assert entry[str(score.token_id)]["logprob"] == pytest.approx(score.logprob)
        assert {name for name in entry if name != str(score.token_id)} <= {str(i) for i in score.top_ids}
        best = entry[str(score.top_ids[0])]
        assert best == {
            "logprob": pytest.approx(score.top_logprobs[0]),
            "rank": 1,
            "decoded_token": chr(score.top_ids[0]),
        }
    again = (await client.post(TEXT, json=body)).json()
    assert again["choices"][0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_chats_prompt_logprobs_are_beside_its_choices():
    runner = ScriptedRunner(model=FakeKV(8, range(260)))
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        body = {"messages": HI, "max_tokens": 1, "prompt_logprobs": 0}
        answer = (await client.post(CHAT, json=body)).json()
    ids = [next(iter(entry)) for entry in answer["prompt_logprobs"][1:]]
    assert ids == [str(i) for i in CHAT_IDS[1:]]
    assert answer["prompt_logprobs"][-1]["259"]["decoded_token"] == "<|assistant|>"


async def test_tokens_by_their_ids_and_parts_of_characters():
    runner = ScriptedRunner(model=FakeKV(8, range(0x80, 0x90)))
    async with scripted_engine(runner=runner) as engine, client_of(create_app(engine)) as client:
        body = {"prompt": "a", "max_tokens": 2, "logprobs": 0}
        by_text = (await client.post(TEXT, json=body)).json()["choices"][0]["logprobs"]
        by_id = (await client.post(TEXT, json={**body, "return_tokens_as_token_ids": True})).json()
        chat = {"messages": HI, "max_tokens": 1, "logprobs": True}
        [entry] = (await client.post(CHAT, json=chat)).json()["choices"][0]["logprobs"]["content"]
    [first, _] = continuation(b"a", 2, vocabulary=range(0x80, 0x90))
    assert by_text["tokens"][0] == f"bytes:\\x{first:02x}"
    assert by_id["choices"][0]["logprobs"]["tokens"][0] == f"token_id:{first}"
    assert entry["token"] == "\ufffd"
    assert 0x80 <= entry["bytes"][0] < 0x90


async def test_scores_end_where_a_stop_string_cuts_the_tokens(client):
    tokens, _ = scored([*b"hi"], 5, 0)
    stop = bytes(tokens[2:4]).decode()
    body = {"prompt": "hi", "max_tokens": 9, "logprobs": 0, "stop": stop, "return_token_ids": True}
    [choice] = (await client.post(TEXT, json=body)).json()["choices"]
    assert choice["text"] == bytes(tokens[:2]).decode()
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) == 4

"""Several choices of a prompt: n, best_of and beams, whole and streamed, in both APIs.

The model draws letters by seed, and scores them, so that each choice can be told and ranked without an engine.
"""

import asyncio

import pytest

from aserve.core.params import BeamParams
from aserve.http import create_app
from tests.engines import scripted_engine
from tests.fakes import FakeKV, ScriptedRunner, continuation, scores_of
from tests.http.conftest import client_of
from tests.http.events import events_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LETTERS = range(97, 123)
SEED = 5
NUM_TOKENS = 6
SAMPLED = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": SEED}
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "hi"}}
BEAMS = {"max_tokens": NUM_TOKENS, "use_beam_search": True}
BOTH_APIS = pytest.mark.parametrize("url", [CHAT, TEXT], ids=["chat", "text"])


@pytest.fixture
async def engine():
    async with scripted_engine(runner=ScriptedRunner(model=FakeKV(8, LETTERS, seeded=True))) as engine:
        yield engine
        await asyncio.sleep(0)
        statistics = engine.statistics()
        assert (statistics.num_used_blocks, statistics.num_running, statistics.num_waiting) == (0, 0, 0)


@pytest.fixture
async def client(engine):
    async with client_of(create_app(engine)) as client:
        yield client


async def prompt_of(engine, url):
    return await engine.encode_chat(MESSAGES) if url == CHAT else await engine.encode("hi")


def drawn(prompt, seed):
    """What the model answers with that seed."""
    return bytes(continuation(prompt, NUM_TOKENS, vocabulary=LETTERS, seed=seed)).decode()


def logprob_of(prompt, text):
    """How likely the model finds an answer."""
    context = [(position, token, 0) for position, token in enumerate((*prompt, *text.encode()))]
    return sum(
        scores_of(context[:end], LETTERS, context[end][1], 0).logprob for end in range(len(prompt), len(context))
    )


def text_of(choice):
    return choice["message"]["content"] if "message" in choice else choice["text"]


def piece_of(choice):
    return choice["delta"]["content"] if "delta" in choice else choice["text"]


async def whole(client, url, **fields):
    """Texts by index, and usage."""
    body = (await client.post(url, json={**BODIES[url], **fields})).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return [text_of(choice) for choice in body["choices"]], body["usage"]


async def streamed(client, url, num_choices, **fields):
    """Texts by index, and usage. Every choice must end once, and say nothing afterwards."""
    asked = {**BODIES[url], **fields, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events_of((await client.post(url, json=asked)).text)
    texts, ended = [""] * num_choices, set()
    for (choice,) in (chunk["choices"] for chunk in chunks):
        assert choice["index"] not in ended
        texts[choice["index"]] += piece_of(choice)
        if choice["finish_reason"]:
            ended.add(choice["index"])
    assert ended == set(range(num_choices))
    assert last["choices"] == []
    return texts, last["usage"]


@BOTH_APIS
async def test_each_choice_is_what_its_seed_gives_alone(client, engine, url):
    prompt = await prompt_of(engine, url)
    texts = [drawn(prompt, SEED + k) for k in range(3)]
    answers = [await whole(client, url, **SAMPLED, n=3), await streamed(client, url, 3, **SAMPLED, n=3)]
    for found, usage in answers:
        assert found == texts
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 3 * NUM_TOKENS)
        assert usage["total_tokens"] == len(prompt) + 3 * NUM_TOKENS
    alone = [(await whole(client, url, **{**SAMPLED, "seed": SEED + k}))[0] for k in range(3)]
    assert alone == [[text] for text in texts]


@pytest.mark.parametrize("prompts", [["one"], ["one", "another", "x"]])
async def test_choice_k_of_prompt_p_has_the_index_p_n_plus_k(client, engine, prompts):
    texts = [drawn(prompt.encode(), SEED + k) for prompt in prompts for k in range(3)]
    asked = {**SAMPLED, "prompt": prompts, "n": 3}
    for found, usage in (await whole(client, TEXT, **asked), await streamed(client, TEXT, len(texts), **asked)):
        assert found == texts
        assert usage["prompt_tokens"] == sum(map(len, prompts))
        assert usage["completion_tokens"] == len(texts) * NUM_TOKENS


async def test_choices_stream_side_by_side_and_each_begins_with_its_role(client):
    body = {**BODIES[CHAT], **SAMPLED, "n": 3, "stream": True}
    choices = [chunk["choices"][0] for chunk in events_of((await client.post(CHAT, json=body)).text)]
    firsts = [next(choice for choice in choices if choice["index"] == k) for k in range(3)]
    assert [first["delta"] for first in firsts] == [{"role": "assistant", "content": ""}] * 3
    first_end = next(place for place, choice in enumerate(choices) if choice["finish_reason"])
    assert {choice["index"] for choice in choices[:first_end]} == {0, 1, 2}


async def test_a_prompt_counts_as_cached_once(client):
    asked = {**SAMPLED, "prompt": "a prompt of several blocks", "n": 4}
    counts = [(await whole(client, TEXT, **asked))[1]["prompt_tokens_details"]["cached_tokens"] for _ in range(2)]
    assert counts == [0, 24]


@pytest.mark.parametrize("stops", [{"stop": "q"}, {"stop_token_ids": [113]}])
async def test_a_choice_that_stops_leaves_the_others_alone(client, engine, stops):
    prompt = await prompt_of(engine, TEXT)
    texts = [drawn(prompt, SEED + k) for k in range(12)]
    kept = [text.partition("q")[0] for text in texts] if "stop" in stops else [_until(text, "q") for text in texts]
    assert kept != texts
    found, usage = await streamed(client, TEXT, 12, **SAMPLED, **stops, n=12)
    assert found == kept == (await whole(client, TEXT, **SAMPLED, **stops, n=12))[0]
    assert usage["completion_tokens"] == sum(len(_until(text, "q")) for text in texts)


def _until(text, letter):
    return text[: text.find(letter) + 1] or text


@BOTH_APIS
async def test_best_of_gives_the_likeliest_and_nothing_before_the_end(client, engine, url):
    prompt = await prompt_of(engine, url)
    texts = sorted((drawn(prompt, SEED + k) for k in range(4)), key=lambda text: -logprob_of(prompt, text))
    asked = {**SAMPLED, "n": 2, "best_of": 4}
    for found, usage in (await whole(client, url, **asked), await streamed(client, url, 2, **asked)):
        assert found == texts[:2]
        assert usage["completion_tokens"] == 2 * NUM_TOKENS
    chunks = events_of((await client.post(url, json={**BODIES[url], **asked, "stream": True})).text)
    said = [choice for chunk in chunks for choice in chunk["choices"] if piece_of(choice)]
    assert [(piece_of(choice), choice["finish_reason"]) for choice in said] == [(text, "length") for text in texts[:2]]


@BOTH_APIS
async def test_beams_are_those_of_the_engine_best_first(client, engine, url):
    prompt = await prompt_of(engine, url)
    asked = {**BEAMS, "n": 2, "best_of": 4, "length_penalty": 0.5, "early_stopping": True}
    beam = BeamParams(width=4, length_penalty=0.5, early_stopping=True)
    best = await engine.beam_search(prompt, beam, n=2, max_tokens=NUM_TOKENS)
    for completion in best:
        assert completion.cumulative_logprob == pytest.approx(logprob_of(prompt, completion.text))
    assert best[0].cumulative_logprob > best[1].cumulative_logprob  # of one length
    texts = [completion.text for completion in best]
    assert (await whole(client, url, **asked))[0] == texts
    found, usage = await streamed(client, url, 2, **asked)
    assert found == texts
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 2 * NUM_TOKENS)


async def test_without_best_of_the_width_is_n(client, engine):
    best = await engine.beam_search(await prompt_of(engine, TEXT), BeamParams(width=3), max_tokens=NUM_TOKENS)
    assert (await whole(client, TEXT, **BEAMS, n=3))[0] == [completion.text for completion in best]


@pytest.mark.parametrize("fields", [{}, {"best_of": 4}], ids=["n", "best_of"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_echoed_prompt_has_the_same_scores_in_each_choice(client, fields, stream):
    asked = {"prompt": "hello", **SAMPLED, "n": 2, **fields, "echo": True, "logprobs": 1, "stream": stream}
    response = await client.post(TEXT, json=asked)
    bodies = events_of(response.text) if stream else [response.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    firsts = [next(choice for choice in choices if choice["index"] == k) for k in range(2)]
    for first in firsts:
        assert first["text"].startswith("hello")
        assert first["logprobs"]["tokens"][:5] == list("hello")
    first, second = [choice["logprobs"]["token_logprobs"][:5] for choice in firsts]
    assert first == second
    assert first[0] is None
    assert all(logprob <= 0 for logprob in first[1:])


@BOTH_APIS
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "n"),
        ({"use_beam_search": True, "n": 2, "best_of": 0}, "best_of"),
        ({"use_beam_search": True, "best_of": 129}, "best_of"),
        ({"use_beam_search": True, "n": 129}, "n"),
        ({"use_beam_search": True, "n": 0}, "n"),
        ({"use_beam_search": True, "n": 9}, "n"),  # more than the engine runs at once
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True, "logit_bias": {"97": 1}}, "logit_bias"),
        ({"use_beam_search": True, "allowed_token_ids": [97]}, "allowed_token_ids"),
        ({"use_beam_search": True, "bad_words": ["no"]}, "bad_words"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(client, url, fields, param):
    response = await client.post(url, json={**BODIES[url], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize("fields", [{"n": 9}, {"best_of": 9}, {"use_beam_search": True, "n": 9}])
async def test_sequences_are_bounded_over_all_prompts(client, fields):
    response = await client.post(TEXT, json={"prompt": ["x"] * 1000, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "prompts times choices must be at most 8192, got 1000 times 9"


@BOTH_APIS
async def test_beams_have_no_logprobs(client, url):
    response = await client.post(url, json={**BODIES[url], **BEAMS, "logprobs": True if url == CHAT else 1})
    assert response.json()["error"]["message"] == "logprobs does not work with beam search"

"""The routes that ask a model that pools: their shapes, which are vLLM's and OpenAI's, and what they refuse.

The model makes four numbers of an input: how many tokens, the first, the last, and where a second text begins.
"""

import asyncio
import base64
import struct
import sys
from array import array
from contextlib import asynccontextmanager
from math import sqrt

import openai
import pytest

from aserve.core.pooling import Pooling
from aserve.http import create_app
from aserve.http.pooling.fields import encoded
from tests.engines import scripted_engine
from tests.http.conftest import client_of

EMBEDS = Pooling(task="embed", method="last", size=4, activation="none", dimensions=(2, 4))
NORMALIZES = Pooling(task="embed", method="last", size=4, activation="normalize", dimensions=())
CLASSIFIES = Pooling(task="classify", method="last", size=4, activation="softmax", labels=("a", "b", "c", "d"))
SCORES = Pooling(task="classify", method="last", size=1, activation="none")
LETTERS = "abc"


@asynccontextmanager
async def served(pooling: Pooling | None = EMBEDS, **options):
    """A client of an engine that pools; afterwards it holds nothing."""
    async with scripted_engine(pooling=pooling, **options) as engine, client_of(create_app(engine)) as client:
        yield client
        await asyncio.sleep(0)
        statistics = engine.statistics()
        assert (statistics.num_used_blocks, statistics.num_running, statistics.num_waiting) == (0, 0, 0)


async def data_of(client, path="/v1/embeddings", **body):
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()["data"]


async def refusal_of(client, path="/v1/embeddings", **body):
    response = await client.post(path, json=body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        ("abc", [[3, 97, 99, -1]]),
        (["abc", "d"], [[3, 97, 99, -1], [1, 100, 100, -1]]),
        ([5, 6], [[2, 5, 6, -1]]),
        ([[5, 6], [7]], [[2, 5, 6, -1], [1, 7, 7, -1]]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
async def test_each_kind_of_input_has_its_vectors_in_order(given, vectors):
    async with served() as client:
        response = await client.post("/v1/embeddings", json={"model": "scripted", "input": given})
        body = response.json()
        assert [item["embedding"] for item in body["data"]] == vectors
        assert [item["index"] for item in body["data"]] == list(range(len(vectors)))
        assert {item["object"] for item in body["data"]} == {"embedding"}
        assert (body["object"], body["model"]) == ("list", "scripted")
        num_tokens = int(sum(vector[0] for vector in vectors))
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == num_tokens


async def test_openais_package_reads_the_answer():
    """By default it asks for base64, and decodes that itself."""
    async with served() as client:
        sdk = openai.AsyncOpenAI(api_key="x", base_url="http://aserve/v1", http_client=client)
        answer = await sdk.embeddings.create(model="scripted", input=["abc", "d"], user="somebody")
        assert [item.embedding for item in answer.data] == [[3, 97, 99, -1], [1, 100, 100, -1]]
        assert answer.usage.total_tokens == 4
        floats = await sdk.embeddings.create(model="scripted", input="abc", encoding_format="float", dimensions=2)
        assert floats.data[0].embedding == [3, 97]


async def test_each_token_has_a_vector_where_the_task_says_so():
    """Catches vectors of all tokens that are told as one, and an activation over all of them together."""
    async with served() as client:
        data = await data_of(client, "/pooling", input=["abc", "d"], task="token_embed")
        assert [item["data"] for item in data] == [[[i, 97 + i, 99, -1] for i in range(3)], [[0, 100, 100, -1]]]
        [item] = await data_of(
            client, "/pooling", input="abc", task="token_embed", encoding_format="base64", dimensions=2
        )
        assert array("f", base64.b64decode(item["data"])).tolist() == [0, 97, 1, 98, 2, 99]
        assert (
            "--convert classify" in (await refusal_of(client, "/pooling", input="a", task="token_classify"))["message"]
        )
    async with served(CLASSIFIES) as client:
        [item] = await data_of(client, "/pooling", input="abc", task="token_classify")
        assert [sum(probabilities) for probabilities in item["data"]] == pytest.approx([1.0] * 3, abs=1e-6)
    wide = Pooling(task="embed", method="last", size=2**22, activation="none")
    async with served(wide) as client:
        assert (
            "over the limit of 4194304"
            in (await refusal_of(client, "/pooling", input="ab", task="token_embed"))["message"]
        )
    encoder = Pooling(task="classify", method="cls", size=4, activation="softmax", is_causal=False)
    async with served(encoder) as client:
        error = await refusal_of(client, "/pooling", input="abc", task="token_classify")
        assert (error["param"], "as a whole" in error["message"]) == ("task", True)


async def test_base64_is_of_little_endian_float32():
    async with served() as client:
        [item] = await data_of(client, input="abc", encoding_format="base64")
        assert array("f", base64.b64decode(item["embedding"])).tolist() == [3, 97, 99, -1]


def test_base64_is_little_endian_where_numbers_are_not(monkeypatch):
    """As seen from a machine on which they are: the bytes are the other way round. The vector is as it was."""
    values = array("f", [1.0, 2.0])
    monkeypatch.setattr(sys, "byteorder", "big")
    assert base64.b64decode(encoded(values, "base64")) == struct.pack(">2f", 1.0, 2.0)
    assert values.tolist() == encoded(values, "float") == [1.0, 2.0]


async def test_shortened_embeddings_are_normalized_anew_and_only_where_the_model_allows_it():
    async with served(NORMALIZES) as client:
        [item] = await data_of(client, input="abc", dimensions=2)
        norm = sqrt(3**2 + 97**2)
        assert item["embedding"] == pytest.approx([3 / norm, 97 / norm], rel=1e-6)
        [item] = await data_of(client, input="abc", dimensions=3, use_activation=False)
        assert item["embedding"] == [3, 97, 99]
        assert "[1, 4]" in (await refusal_of(client, input="abc", dimensions=5))["message"]
    async with served(EMBEDS) as client:
        error = await refusal_of(client, input="abc", dimensions=3)
        assert (error["param"], "one of 2, 4" in error["message"]) == ("dimensions", True)
        assert (await refusal_of(client, input="abc", dimensions=0))["param"] == "dimensions"


async def test_a_hundred_inputs_come_back_in_order_while_eight_run_at_once():
    async with served() as client:
        items = await data_of(client, input=[[1] * (1 + i % 7) + [i] for i in range(100)])
        assert [item["embedding"][2] for item in items] == list(range(100))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "not empty"),
        ({"input": 5}, "input", "a text"),
        ({"input": ["a", 5]}, "input", "input[1]"),
        ({"input": [["a"]]}, "input", "input[0]"),
        ({"input": ["a", ""]}, "input", "input[1] is empty"),
        ({"input": ["a", "x" * 129]}, "input", "input[1] has 129 tokens, and the model takes at most 128"),
        ({"input": ["a"] * 2049}, "input", "2048"),
        ({"input": [1, 999]}, "input", "999"),
        ({"input": [1, -1]}, "input", "-1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "dimension": 2}, "dimension", "did you mean dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({}, "input", "required"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages", "is given in input"),
    ],
)
async def test_what_is_wrong_is_told_by_field_and_index(body, param, words):
    async with served() as client:
        error = await refusal_of(client, **body)
        assert error["param"] == param
        assert words in error["message"]


async def test_inputs_are_as_long_as_the_model_takes_and_longer_ones_are_cut_if_asked():
    async with served() as client:
        [whole] = await data_of(client, input="a" * 127 + "b")
        assert whole["embedding"][:3] == [128, 97, 98]
        [cut] = await data_of(client, input="a" + "b" * 200, truncate_prompt_tokens=-1)
        assert cut["embedding"][:3] == [128, 97, 98]
        [right] = await data_of(client, input="abcdef", truncate_prompt_tokens=2)
        [left] = await data_of(client, input=[1, 2, 3], truncate_prompt_tokens=2, truncation_side="left")
        assert (right["embedding"][:3], left["embedding"][:3]) == ([2, 97, 98], [2, 2, 3])


async def test_who_asks_a_model_for_what_it_is_not_for_is_told_the_flag():
    async with served(None) as client:
        for path in ("/v1/embeddings", "/classify", "/pooling"):
            assert "--runner pooling" in (await refusal_of(client, path, input="a"))["message"]
        assert "--runner pooling" in (await refusal_of(client, "/rerank", query="a", documents=["b"]))["message"]
    async with served() as client:
        messages = [{"role": "user", "content": "hi"}]
        assert "--runner generate" in (await refusal_of(client, "/v1/chat/completions", messages=messages))["message"]
        assert "--runner generate" in (await refusal_of(client, "/v1/completions", prompt="hi"))["message"]
        assert "--convert classify" in (await refusal_of(client, "/classify", input="a"))["message"]
    async with served(CLASSIFIES) as client:
        assert "--convert embed" in (await refusal_of(client, input="a"))["message"]
        assert "one label" in (await refusal_of(client, "/score", text_1="a", text_2="b"))["message"]


async def test_classes_have_probabilities_and_a_name():
    async with served(CLASSIFIES) as client:
        [item] = await data_of(client, "/classify", input=[97, 3])
        assert item["label"] == "a" if item["probs"][0] > item["probs"][1] else "b"
        assert sum(item["probs"]) == pytest.approx(1.0)
        assert item["num_classes"] == 4
        [raw] = await data_of(client, "/classify", input="ab", use_activation=False)
        assert (raw["probs"], raw["label"]) == ([2, 97, 98, -1], "c")


async def test_pooling_gives_whatever_the_model_makes():
    async with served() as client:
        [item] = await data_of(client, "/pooling", input="ab", task="embed", dimensions=2)
        assert item == {"object": "pooling", "index": 0, "data": [2, 97]}
        assert "--convert classify" in (await refusal_of(client, "/pooling", input="a", task="classify"))["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"queries": "q", "documents": ["a", "bcd"]},
        {"text_1": "q", "text_2": ["a", "bcd"]},
        {"data_1": ["q"], "data_2": ["a", "bcd"]},
        {"queries": ["q", "q"], "items": [{"text": "a"}, "bcd"]},
    ],
)
async def test_a_classifier_scores_pairs_as_one_input(body):
    """The fake scores a pair by its length."""
    async with served(SCORES) as client:
        items = await data_of(client, "/v1/score", **body)
        assert items == [
            {"index": 0, "object": "score", "score": 2.0},
            {"index": 1, "object": "score", "score": 4.0},
        ]


async def test_embeddings_are_scored_by_their_cosine():
    async with served(NORMALIZES) as client:
        items = await data_of(client, "/score", text_1="ab", text_2=["ab", "zzzz"])
        one, other = (2, 97, 98, -1), (4, 122, 122, -1)
        product = sum(a * b for a, b in zip(one, other, strict=True))
        norms = sqrt(sum(a * a for a in one) * sum(b * b for b in other))
        assert [item["score"] for item in items] == pytest.approx([1.0, product / norms], abs=1e-6)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_reranking_tells_the_best_first(path):
    async with served(SCORES) as client:
        body = {"query": "q", "documents": ["a", "bcd", {"text": "ef"}], "model": "scripted"}
        answer = (await client.post(path, json=body)).json()
        assert [(item["index"], item["relevance_score"]) for item in answer["results"]] == [
            (1, 4.0),
            (2, 3.0),
            (0, 2.0),
        ]
        assert answer["results"][1]["document"] == {"text": "ef"}
        assert answer["usage"]["prompt_tokens"] == 9
        few = (await client.post(path, json={**body, "top_n": 1, "return_documents": False})).json()
        assert few["results"] == [{"index": 1, "relevance_score": 4.0}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"queries": "a"}, "queries"),
        ("/score", {"queries": "a", "text_2": "b"}, "queries"),
        ("/score", {"queries": ["a", "b"], "documents": ["c"]}, "queries"),
        ("/score", {"queries": "a", "documents": []}, "documents"),
        ("/rerank", {"query": ["a", "b"], "documents": ["c"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["c", 5]}, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "c"}]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["c", "d" * 200]}, "documents"),
        ("/rerank", {"query": "a", "documents": ["c"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["c"], "instruction": "find"}, "chat_template_kwargs"),
    ],
)
async def test_what_is_wrong_with_texts_to_score_is_told(path, body, param):
    async with served(SCORES) as client:
        assert (await refusal_of(client, path, **body))["param"] == param


async def test_who_leaves_leaves_nothing_behind():
    """The block of `served` says that nothing is held."""
    async with served() as client:
        task = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["abc"] * 500}))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

"""`aserve bench`: figures of a server and of a model in this process, by the load generator of the benchmarks."""

import json
import random

import pytest

from aserve.cli.bench.targets import WORDS, EngineTarget, server
from aserve.core.errors import ConfigError
from aserve.load.arrivals import Arrival
from aserve.load.drive import closed_loop, open_loop
from aserve.load.figures import of_round
from tests.cli.fake_openai import fake_openai
from tests.cli.program import aserve
from tests.e2e.server_process import serving
from tests.engines import scripted_engine

HERE = ("--device", "cpu", "--kv-cache-memory-bytes", "8Mi")
SMALL = ("--concurrency", "1", "3", "--requests", "8", "--rounds", "2", "--input-len", "20", "--output-len", "6")
ASKED = Arrival(0.0, 12, 5)


async def test_an_engine_is_loaded_as_a_server_is():
    async with scripted_engine() as engine:
        target = EngineTarget(engine, 12, 5)
        done = await closed_loop(target, [ASKED] * 6, 3, random.Random(0))
        later = await open_loop(target, [ASKED._replace(at_s=0.01 * i) for i in range(4)], random.Random(0))
    for samples, num in ((done.samples, 6), (later.samples, 4)):
        assert [(sample.num_in, sample.num_out) for sample in samples] == [(12, 5)] * num
        assert all(sample.due_s <= sample.sent_s < sample.event_s[0] <= sample.end_s for sample in samples)
    figures = of_round(done)
    assert (figures["errors"], figures["short_answers"], figures["output_tokens"]) == (0, 0, 30)


async def test_what_an_engine_refuses_is_a_failure_and_not_the_end():
    async with scripted_engine() as engine:
        done = await closed_loop(EngineTarget(engine, 12, 5), [ASKED, Arrival(0.0, 200, 5)], 1, random.Random(0))
    assert len(done.samples) == 1
    assert done.failures == [
        "AnswerError: the prompt has 200 tokens and leaves no room to answer: the context is 128 tokens"
    ]


async def test_lengths_that_do_not_fit_are_told_at_once():
    async with scripted_engine() as engine:
        with pytest.raises(ConfigError, match="--input-len 100 and --output-len 29 are over the context of 128 tokens"):
            EngineTarget(engine, 100, 29)


def test_words_in_place_of_ids():
    target = server("http://host/v1", "m", None, 1.0, as_text=True)
    body = json.loads(target.body([0, 1, len(WORDS) - 1], 4))
    assert (body["prompt"], "ignore_eos" in body, target.url) == (
        f"{WORDS[0]} {WORDS[1]} {WORDS[-1]}",
        False,
        "http://host",
    )
    assert json.loads(server("http://host/v1", "m", None, 1.0, as_text=False).body([5], 4))["ignore_eos"] is True
    with pytest.raises(ConfigError, match="does not end with /v1"):
        server("http://host/api", "m", None, 1.0, as_text=True)


@pytest.mark.e2e
@pytest.mark.slow
def test_a_server_and_a_model_here():
    with serving() as running:
        running.wait_until_ready()
        there = aserve("bench", "--url", running.url, *SMALL, "--json")
        rate = aserve("bench", "--url", running.url, "--rate", "50", "--requests", "5", "--rounds", "1", "--json")
        shown = aserve("bench", "--url", running.url, *SMALL)
    here = aserve("bench", *HERE, *SMALL, "--json")
    for done in (there, here):
        assert (done.code, done.err) == (0, "")
        one, three = map(json.loads, done.out.splitlines())
        assert (one["concurrency"], three["concurrency"], one["input_len"], one["rounds"]) == (1, 3, 20, 2)
        assert (three["figures"]["requests"], three["figures"]["output_tokens"], three["figures"]["errors"]) == (
            6,
            36,
            0,
        )
        for figure in ("ttft_p50_ms", "ttft_p90_ms", "itl_p99_ms", "output_tokens_per_s", "latency_p50_ms"):
            assert one["figures"][figure] > 0
        assert one["figures"]["ttft_p50_ms"] <= one["figures"]["ttft_p90_ms"] <= one["figures"]["ttft_p99_ms"]
    assert json.loads(rate.out)["rate"] == 50.0
    lines = shown.out.splitlines()
    assert lines[0].startswith(f"demo at {running.url}/v1: prompts of 20 tokens, answers of 6, medians of 2 rounds")
    assert [line.split()[:3] for line in lines[3:]] == [["1", "at", "once"], ["3", "at", "once"]]
    assert max(map(len, lines)) <= 130


@pytest.mark.e2e
@pytest.mark.slow
def test_where_the_time_of_a_step_goes():
    done = aserve("bench", *HERE, "--profile", "--concurrency", "2", "--input-len", "16", "--json")
    decode, prefill = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert (decode["kind"], decode["rows"], prefill["kind"], prefill["tokens"]) == ("decode", 2, "prefill", 16)
    assert decode["step_ms"] > 0
    for step in (decode, prefill):
        assert any(name.startswith("attend") and taken_ms > 0 for name, taken_ms in step["kernels_ms"].items())


@pytest.mark.e2e
@pytest.mark.slow
def test_mistakes_are_one_line():
    refused = aserve("bench", "--profile", "--url", "http://127.0.0.1:9")
    assert (refused.code, refused.err.split(",")[0]) == (1, "aserve: --profile is of a model in this process")
    with fake_openai(key="secret") as fake:
        nobody = aserve("bench", "--url", fake.url, "--model", "m", "--text", "--input-len", "3")
        failing = aserve("bench", "--url", fake.url + "/elsewhere", "--model", "m")
    assert (nobody.code, nobody.out) == (1, "")
    assert nobody.err.startswith("aserve: no request was answered: status 401")
    assert "does not end with /v1" in failing.err


@pytest.mark.parametrize(("words", "told"), [(("--concurrency", "0"), "a number in"), (("--rate", "0"), "over 0")])
def test_wrong_words_are_refused(words, told):
    from aserve.cli.settings import parse_command

    with pytest.raises(ConfigError, match=told):
        parse_command(["bench", *words], {})

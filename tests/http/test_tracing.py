"""Spans of requests, as an exporter gets them: their times, their parents, what they say, and what they keep quiet."""

import asyncio

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from aserve.core.params import SamplingParams
from aserve.core.pooling import Pooling
from aserve.http import Keyring, create_app
from aserve.http.tracing import Tracing
from tests.engines import says, scripted_engine
from tests.fakes import FakeScript, ScriptedRunner
from tests.http.conftest import client_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "xyzzy-secret"
EMBEDS = Pooling(task="embed", method="last", size=4, activation="none")
CHAT = {
    "model": "also/scripted",
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 20,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 7,
}


class Spans:
    """What was exported, by name."""

    def __init__(self, sampler=None):
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def all(self):
        return self.exporter.get_finished_spans()

    def named(self, name):
        return [span for span in self.all if span.name == name]

    def one(self, name):
        [span] = self.named(name)
        return span


@pytest.fixture
def spans():
    return Spans()


def traced(engine, spans, **options):
    return client_of(Tracing(create_app(engine, **options), engine, spans.tracer))


@pytest.fixture
async def client(engine, spans):
    async with traced(engine, spans) as client:
        yield client


async def test_a_chat_is_a_span_of_http_and_one_of_the_engine_with_three_phases(client, spans):
    answer = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    top, chat = spans.one("POST /v1/chat/completions"), spans.one("chat scripted")
    assert (top.kind, top.parent, top.status.status_code) == (SpanKind.SERVER, None, StatusCode.UNSET)
    assert dict(top.attributes) == {
        "http.request.method": "POST",
        "url.scheme": "http",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "aserve.request_id": "mine",
    }
    told = dict(chat.attributes)
    assert told.pop("gen_ai.response.time_to_first_chunk") > 0
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "aserve",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
    }
    assert chat.parent.span_id == top.context.span_id
    queue, prefill, decode = (spans.one(name) for name in ("queue", "prefill", "decode"))
    assert {span.parent.span_id for span in (queue, prefill, decode)} == {chat.context.span_id}
    assert {span.context.trace_id for span in spans.all} == {top.context.trace_id}
    assert top.start_time <= chat.start_time == queue.start_time
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    assert decode.end_time <= chat.end_time <= top.end_time
    assert decode.end_time > decode.start_time


async def test_a_clients_span_is_the_parent(client, spans):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers)
    top = spans.one("POST /v1/completions")
    assert (f"{top.context.trace_id:032x}", f"{top.parent.span_id:016x}", top.parent.is_remote) == (TRACE, PARENT, True)
    assert top.context.trace_state.to_header() == "vendor=1"
    assert {f"{span.context.trace_id:032x}" for span in spans.all} == {TRACE}
    assert spans.one("text_completion scripted").parent.span_id == top.context.span_id


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "nonsense")],
        [("traceparent", f"00-{'0' * 32}-{PARENT}-01")],
        [("traceparent", "\xff" * 55)],
        [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("traceparent", f"00-{TRACE}-{PARENT}-01")],
    ],
)
async def test_a_parent_that_cannot_be_read_is_none(client, spans, headers):
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    assert (await client.get("/v1/models", headers=encoded)).status_code == 200
    assert spans.one("GET /v1/models").parent is None


async def test_what_the_client_does_not_want_sampled_is_not(engine):
    spans = Spans()
    async with traced(engine, spans) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert spans.all == ()
    off = Spans(ALWAYS_OFF)
    async with traced(engine, off) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert off.all == ()


async def test_no_word_of_a_prompt_or_an_answer_is_in_a_span(client, spans):
    await client.post("/v1/chat/completions", json={**CHAT, "stop": [SECRET]})
    await client.post(f"/{SECRET}?key={SECRET}", json=CHAT, headers={"Authorization": f"Bearer {SECRET}"})
    assert len(spans.all) == 6
    text = "".join(span.to_json() for span in spans.all)
    assert SECRET not in text
    assert "Hello" not in text


async def test_several_prompts_and_choices(client, spans):
    body = {"prompt": ["a", "bc"], "max_tokens": 3, "n": 2}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    prompts = spans.named("text_completion scripted")
    assert sorted(span.attributes["gen_ai.usage.input_tokens"] for span in prompts) == [1, 2]
    for span in prompts:
        assert span.attributes["gen_ai.request.choice.count"] == 2
        assert span.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
        assert span.attributes["gen_ai.usage.output_tokens"] == 6
        assert span.parent.span_id == spans.one("POST /v1/completions").context.span_id


async def test_a_stream_is_traced_to_its_end(client, spans):
    async with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        assert (await answer.aread()).endswith(b"[DONE]\n\n")
    assert spans.one("chat scripted").attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert "aserve.cut" not in spans.one("POST /v1/chat/completions").attributes


async def test_a_refused_request_says_why_and_has_nothing_of_the_engine(client, spans):
    assert (await client.post("/v1/chat/completions", json={**CHAT, "temperature": 9})).status_code == 400
    [span] = spans.all
    assert span.attributes["http.response.status_code"] == 400
    assert span.attributes["error.type"]
    assert span.status.status_code is StatusCode.UNSET  # it is the client's fault


async def test_a_step_that_fails_marks_both_spans(spans):
    runner = ScriptedRunner(model=FakeScript(says("Hi")), poison=lambda _plan: RuntimeError(SECRET))
    async with scripted_engine(runner=runner) as engine, traced(engine, spans) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 500
    top, chat = spans.one("POST /v1/chat/completions"), spans.one("chat scripted")
    assert (top.status.status_code, chat.status.status_code) == (StatusCode.ERROR, StatusCode.ERROR)
    assert top.attributes["error.type"] == chat.attributes["error.type"]
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("error",)
    assert not spans.named("queue")
    assert SECRET not in "".join(span.to_json() for span in spans.all)


async def test_who_leaves_ends_as_aborted(spans):
    runner = ScriptedRunner(model=FakeScript(says("Hello")))
    runner.hold()
    async with scripted_engine(runner=runner) as engine, traced(engine, spans) as client:
        task = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        for _ in range(100):
            await asyncio.sleep(0)
        assert engine.statistics().num_running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        runner.let_land()
    assert spans.one("text_completion scripted").attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert spans.one("POST /v1/completions").attributes["aserve.cut"] is True


async def test_probes_and_scrapes_are_not_traced(client, spans):
    for path in ("/health", "/ready", "/metrics", "/version", "/", "/ui/nothing.js"):
        await client.get(path)
    assert [span.name for span in spans.all] == []


async def test_a_tenant_is_named(engine, spans, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"- {{name: shop, key: {SECRET}}}\n")
    async with traced(engine, spans, keyring=Keyring(path=keys, tenants=engine.tenants)) as client:
        await client.post("/v1/chat/completions", json=CHAT, headers={"Authorization": f"Bearer {SECRET}"})
    assert spans.one("POST /v1/chat/completions").attributes["aserve.tenant"] == "shop"


async def test_what_is_asked_from_python_is_traced_in_the_callers_span(engine, spans):
    Tracing(create_app(engine), engine, spans.tracer)
    with spans.tracer.start_as_current_span("mine") as mine:
        await engine.complete("a prompt", SamplingParams(max_tokens=3, top_k=5, presence_penalty=1.0))
    span = spans.one("text_completion scripted")
    assert span.parent.span_id == mine.get_span_context().span_id
    assert (span.attributes["gen_ai.request.top_k"], span.attributes["gen_ai.request.presence_penalty"]) == (5, 1.0)


async def test_an_application_that_traces_already_is_the_parent(engine, spans):
    inner = Tracing(create_app(engine), engine, spans.tracer)

    async def outer(scope, receive, send):
        with spans.tracer.start_as_current_span("outer"):
            await inner(scope, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://aserve") as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers)
    assert spans.one("POST /v1/completions").parent.span_id == spans.one("outer").context.span_id


async def test_a_background_response_is_told_under_the_request_that_asked(engine, spans, client):
    body = {"model": "scripted", "input": SECRET, "background": True, "store": True}
    answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200
    for _ in range(1000):
        await asyncio.sleep(0)
    assert spans.one("chat scripted").parent.span_id == spans.one("POST /v1/responses").context.span_id


async def test_an_embedding_has_no_tokens_of_output(spans):
    async with scripted_engine(pooling=EMBEDS) as engine, traced(engine, spans) as client:
        assert (await client.post("/v1/embeddings", json={"input": "abc"})).status_code == 200
    span = spans.one("embeddings scripted")
    assert "gen_ai.usage.output_tokens" not in span.attributes
    assert span.attributes["gen_ai.usage.input_tokens"] > 0
    assert len(spans.named("queue")) == len(spans.named("prefill")) == 1
    assert not spans.named("decode")


async def test_a_tracer_that_raises_hurts_nobody(engine, caplog):
    class Broken:
        def start_span(self, *arguments, **options):
            raise RuntimeError(SECRET)

    async with client_of(Tracing(create_app(engine), engine, Broken())) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        await engine.complete("a", SamplingParams(max_tokens=2))
    assert len([record for record in caplog.records if "fault" in record.getMessage()]) == 2
    assert SECRET not in caplog.text

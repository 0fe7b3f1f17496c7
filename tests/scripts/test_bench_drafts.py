"""bench_drafts.py and compare_drafts.py on the demonstration model: all is asked, with drafts and without."""

import json
from itertools import chain

import bench_drafts
import compare_drafts
import pytest
from bench_drafts import groups_of, ratios
from peers.table import PEERS

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def test_conversations_are_asked_so_many_at_once():
    several = [[{"role": "user", "content": str(number)}] for number in range(6)]
    asked = {streams: groups_of(several, streams) for streams in (1, 2, 4, 8)}
    assert {streams: [len(group) for group in groups] for streams, groups in asked.items()} == {
        1: [1] * 6,
        2: [2] * 3,
        4: [4],
        8: [8],
    }
    assert [*chain(*asked[1])] == [*chain(*asked[2])] == several
    assert asked[8] == [several + several[:2]]


def test_ratios_are_those_of_pairs():
    assert ratios({True: [2.0, 9.0], False: [1.0, 3.0]}) == [2.0, 3.0]


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_one_engine_answers_with_drafts_and_without(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bench_drafts.py", "--streams", "1", "--rounds", "1"])
    monkeypatch.setattr(bench_drafts, "MAX_TOKENS", 24)
    monkeypatch.setattr(bench_drafts.Drafter, "adopt", bench_drafts.Drafter.adopt)  # it is replaced, and comes back
    bench_drafts.main()
    repeats, new = lines(capsys)
    assert (repeats["kind"], new["kind"]) == ("repeats", "new")
    assert repeats["accepted"] > 10
    assert all(line["ratio"] > 0 and line["ratio_error"] > 0 for line in (repeats, new))


@pytest.mark.e2e
@pytest.mark.thorough
def test_servers_with_drafts_and_without_say_the_same(capsys, monkeypatch):
    monkeypatch.setattr(compare_drafts, "PAUSE_S", 0.0)
    monkeypatch.setattr(compare_drafts, "LEAST_REQUESTS", 6)
    monkeypatch.setattr(compare_drafts, "PEERS", {"aserve": PEERS["aserve"]})
    monkeypatch.setattr(
        "sys.argv", ["compare_drafts.py", "--peers", "aserve", "--streams", "2", "--rounds", "1", "--kinds", "repeats"]
    )
    compare_drafts.main()
    [line] = lines(capsys)
    assert (line["peer"], line["kind"], line["streams"], line["same_answers"]) == ("aserve", "repeats", 2, 1.0)
    assert line["tokens_per_s"] > 0 < line["plain_tokens_per_s"]

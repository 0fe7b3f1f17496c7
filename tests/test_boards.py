"""Every query of our dashboard and alerts asks for metrics, labels and values that a real /metrics has."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from aserve.drafting.ngram import NgramProposer
from aserve.engine import Engine
from aserve.http import Keyring, create_app
from aserve.scheduler.scheduler import Scheduler
from tests.engines import scripted_loader
from tests.http.conftest import client_of

OPS = Path(__file__).parent.parent / "ops"
BOARD = json.loads((OPS / "grafana" / "aserve.json").read_text())
ALERTS = yaml.safe_load((OPS / "prometheus" / "alerts.yml").read_text())
OF_PROMETHEUS = {"job", "instance"}
"""Labels that Prometheus adds to what it scrapes."""
WORDS = {"by", "on", "without", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset"}
GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
SELECTOR = re.compile(r"(?<![\w:.])([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?(?!\s*\(|[a-zA-Z0-9_:])")
MATCHER = re.compile(r'\s*([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"([^"]*)"\s*')

Wanted = tuple[str, dict[str, str]]
"""A metric's name, and what its labels have to be: values, patterns, or "" for any."""


def selectors(query: str) -> Iterator[Wanted]:
    """The metrics of a query. A label that one is grouped by is a label that it has to have."""
    groups = list(grouped(query))
    blank = re.sub(r"\[[^\]]*\]", lambda found: " " * len(found[0]), query)
    blank = GROUPING.sub(lambda found: " " * len(found[0]), blank)
    for found in SELECTOR.finditer(blank):
        name, inside = found.groups()
        if name in WORDS:
            continue
        wanted = {label: "" for labels, start, end in groups if start < found.start() < end for label in labels}
        for part in filter(None, (inside or "").split(",")):
            matcher = MATCHER.fullmatch(part)
            assert matcher is not None, f"{part!r} in {query}"
            wanted[matcher[1]] = matcher[3]
        yield name, wanted


def grouped(query: str) -> Iterator[tuple[list[str], int, int]]:
    """Labels that are grouped by, and where what has them begins and ends: `by(labels) (from here to there)`."""
    for found in re.finditer(r"\bby\s*\(([^)]*)\)\s*\(", query):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(query[end], 0)
            end += 1
        yield [label.strip() for label in found[1].split(",")], found.end() - 1, end


def board_queries() -> Iterator[tuple[str, str]]:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"])[1]


def alert_queries() -> Iterator[tuple[str, str]]:
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


QUERIES = [*board_queries(), *alert_queries()]


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """The labels of each sample by its name, of a server that has answered with drafts, and has tenants."""
    import asyncio

    async def scrape() -> str:
        path = tmp_path_factory.mktemp("keys") / "keys.yaml"
        path.write_text("- {name: shop, key: key}\n")
        load = scripted_loader()
        limits = {"block_size": 8, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        scheduler = Scheduler(**limits, max_model_len=128, proposer=NgramProposer(most=4, shortest=2, longest=4))
        async with Engine(lambda report: replace(load(report), scheduler=scheduler)) as engine:
            app = create_app(engine, keyring=Keyring(path=path, tenants=engine.tenants))
            async with client_of(app) as client:
                answer = await client.post(
                    "/v1/completions",
                    json={"prompt": "abcabcabcabc", "max_tokens": 40, "ignore_eos": True},
                    headers={"Authorization": "Bearer key"},
                )
                assert answer.status_code == 200
                return (await client.get("/metrics")).text

    found: dict[str, list[dict[str, str]]] = {"up": [{}]}
    for family in text_string_to_metric_families(asyncio.run(scrape())):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def is_met(labels: dict[str, str], wanted: dict[str, str]) -> bool:
    """Whether a sample has the labels, with values that are asked for where these are no variables of the board."""
    return all(
        name in OF_PROMETHEUS
        or (name in labels and (not value or "$" in value or re.fullmatch(value, labels[name]) is not None))
        for name, value in wanted.items()
    )


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[f"{title}-{i}" for i, (title, _) in enumerate(QUERIES)])
def test_a_query_asks_for_what_there_is(title, query, series):
    found = list(selectors(query))
    assert found, query
    for name, wanted in found:
        assert name in series, f"{title}: there is no {name}"
        assert any(is_met(labels, wanted) for labels in series[name]), f"{title}: no {name} has {wanted}"


def test_names_labels_and_values_of_a_query_are_found():
    """Catches a parser that passes over what it should check."""
    query = (
        'histogram_quantile(0.9, sum by(le, a_b) (rate(one:x_bucket{m="$m", n=~"a|b"}[5m]))) '
        "/ on() group_left() sum by(c) (two_total) > 1e3 and three"
    )
    assert list(selectors(query)) == [
        ("one:x_bucket", {"le": "", "a_b": "", "m": "$m", "n": "a|b"}),
        ("two_total", {"c": ""}),
        ("three", {}),
    ]


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for grid in (panel["gridPos"] for panel in panels)
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_every_variable_that_a_query_names_is_the_boards():
    known = {variable["name"] for variable in BOARD["templating"]["list"]} | {"__rate_interval"}
    used = {name for _, query in board_queries() for name in re.findall(r"\$\{?(\w+)", query)}
    assert used <= known


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus) is not installed")
@pytest.mark.parametrize(
    "words",
    [("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")],
)
def test_promtool_agrees(words):
    done = subprocess.run(
        ["promtool", *words], cwd=OPS / "prometheus", capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus) is not installed")
def test_promtool_can_read_every_query_of_the_board(tmp_path):
    rules = [
        {"record": f"board:query{i}", "expr": re.sub(r"\$__rate_interval", "5m", query)}
        for i, (_, query) in enumerate(board_queries())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr

"""A request's explanation in the inspector: in a real Chromium, of what a real server says of it."""

import json
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.browser.inspector import STORY, axe_of, opened
from tests.e2e.server_process import ServerProcess

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

EXPLAIN = {"x_aserve": {"explain": True}}
LONG = {"max_tokens": 800, "ignore_eos": True, "temperature": 0}
SLOW = LONG | {"logprobs": 5, "frequency_penalty": 0.1, "structured_outputs": {"regex": "[a-z ]{4000}"}}
"""Longer than a page takes to show it, though the model is small."""
SHORT = LONG | {"max_tokens": 7}
HOW = 'Send the request with "x_aserve": {"explain": true} to be told where its time goes.'
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
KEYS = "- {name: lab, key: of-lab}\n- {name: shop, key: of-shop}\n"


@pytest.fixture
def aside() -> Generator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Generator[ServerProcess]:
    """A server of two tenants."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    started = ServerProcess("--model", "demo", "--port", "0", "--api-keys-file", str(keys)).wait_until_ready()
    yield started
    started.close()


def asked(server, prompt, fields, key=None):
    """A completion, made."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    answer = server.http.post("/v1/completions", json={"prompt": prompt} | fields, headers=headers, timeout=300)
    return answer.raise_for_status().json()


def explanation_of(answer):
    return answer["x_aserve"]["explanation"]


def ms(value):
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"


def is_live(inspector):
    inspector.wait("document.getElementById('sign').textContent === 'live' && inspector.state.number >= 0")


def is_open(inspector, prompt, state):
    """Waits until a request that begins so waits or runs, and gives its id."""
    is_it = f"one.prompt.startsWith({json.dumps(prompt)}) && inspector.state.states.get(one.seq) === '{state}'"
    found = f"[...inspector.state.cards.values()].find((one) => {is_it})?.id"
    inspector.wait(found)
    return inspector.value(found)


def finished(inspector, request_id):
    """Waits until the page has seen its end."""
    inspector.wait(
        f"[...inspector.lives.bySeq.values()].some((one) => one.card.id === {json.dumps(request_id)} && one.endedUs)"
    )


def test_who_waited_is_told_behind_whom_and_what_was_cached(browser, one_row, aside):
    """It is told while the request waits, and again once it has ended; the page's numbers are those of the answer."""
    asked(one_row, STORY * 4, SHORT | EXPLAIN)
    for inspector in opened(browser, one_row.url):
        is_live(inspector)
        blocker = aside.submit(asked, one_row, "Some other prompt", SLOW)
        is_open(inspector, "Some other prompt", "running")
        explained = aside.submit(asked, one_row, STORY * 2 + "But nobody came to buy them. " * 4, SHORT | EXPLAIN)
        inspector.open_request(is_open(inspector, STORY[:20], "waiting"))
        inspector.wait("document.querySelector('#explanation dd')")
        assert inspector.told()["time"].startswith("prepare ")
        assert inspector.told()["queued behind"].startswith("0 ahead, 1 running")
        assert "share of steps" in inspector.told()
        found = explanation_of(explained.result())
        blocker.result()
        inspector.wait("document.getElementById('explanation').textContent.includes('publish')")
        told = inspector.told()
        phases = {name: value for name, value in found["phases_ms"].items() if value}
        assert {"queued", "prefill", "decode"} <= phases.keys()
        whole = " + ".join(f"{name} {ms(value)}" for name, value in phases.items())
        assert told["time"] == f"{whole} = {ms(found['total_ms'])}"
        [hold] = [hold for hold in found["queue"]["holds"] if hold["reason"] == "rows"]
        assert f"; {ms(hold['ms'])}: as many run as may" in told["queued behind"]
        [course] = found["choices"]
        prefix = course["prefix"]
        assert prefix["differs"]["reason"] == "other_tokens"
        assert 0 < prefix["cached_tokens"] < prefix["cacheable_tokens"]
        assert told["cached"] == (
            f"{prefix['cached_tokens']} of {prefix['cacheable_tokens']} tokens; from position "
            f"{prefix['differs']['position']} on not: the nearest request has other tokens there"
        )
        steps = found["steps"]
        assert told["share of steps"] == f"{ms(steps['share_ms'])} of {ms(steps['total_ms'])} in {steps['num']} steps"


def test_who_gave_way_is_told_what_it_cost(browser, small, aside):
    for inspector in opened(browser, small.url):
        is_live(inspector)
        fields = SHORT | EXPLAIN | {"max_tokens": 200}
        futures = [aside.submit(asked, small, f"{letter} story", fields) for letter in "ABCD"]
        explanations = [explanation_of(future.result()) for future in futures]
        found = max(explanations, key=lambda one: one["choices"][0]["num_preemptions"])
        [course] = found["choices"]
        num, lost = course["num_preemptions"], sum(one["lost_ms"] for one in course["preemptions"])
        assert num > 0
        finished(inspector, found["id"])
        inspector.open_request(found["id"])
        inspector.wait("document.querySelector('#explanation dd')")
        told = inspector.told()
        assert told["preempted"] == f"{num} time{'s' if num > 1 else ''}, which cost {ms(lost)}"
        assert f"preempted {ms(found['phases_ms']['preempted'])}" in told["time"]


def test_of_several_choices_each_is_told(browser, server):
    for inspector in opened(browser, server.url):
        is_live(inspector)
        answer = asked(server, STORY * 3, SHORT | EXPLAIN | {"n": 2, "temperature": 1})
        inspector.open_request(explanation_of(answer)["id"])
        inspector.wait("document.querySelector('#explanation dd')")
        assert {"cached 0", "cached 1"} <= inspector.told().keys()


def test_who_did_not_ask_is_told_how_to(browser, one_row, aside):
    """Of one that is still there what is known is told besides; of one that has ended nobody asks the server."""
    for inspector in opened(browser, one_row.url):
        is_live(inspector)
        for _ in range(20):
            blocker = aside.submit(asked, one_row, "A prompt of no consequence", SLOW)
            request_id = is_open(inspector, "A prompt of no", "running")
            inspector.open_request(request_id)
            inspector.wait("document.querySelector('#explanation dd')")
            told = inspector.told()
            if "time" in told:
                break
            inspector.page.keyboard.press("Escape")  # it had ended before the page was opened
            blocker.result()
        assert "running " in told["time"]
        assert told["explanation"] == HOW
        num_asked = len(inspector.explanations)
        assert inspector.explanations[-1] == request_id
        blocker.result()
        inspector.wait("document.querySelectorAll('#explanation dd').length === 1")
        assert inspector.told() == {"explanation": HOW}
        inspector.page.keyboard.press("Escape")
        inspector.open_request(request_id)
        assert inspector.told() == {"explanation": HOW}
        assert len(inspector.explanations) == num_asked


def test_a_tenant_is_told_of_its_own_requests(browser, shared):
    for inspector in opened(browser, shared.url, key="of-lab"):
        is_live(inspector)
        found = explanation_of(asked(shared, STORY, SHORT | EXPLAIN, key="of-lab"))
        inspector.open_request(found["id"])
        inspector.wait("document.querySelector('#explanation dd')")
        assert inspector.told()["time"].endswith(f"= {ms(found['total_ms'])}")
        assert inspector.explanations == [found["id"]]


def test_of_anothers_requests_a_tenant_is_told_how_many_there_are(browser, shared, aside):
    for inspector in opened(browser, shared.url, key="of-shop"):
        is_live(inspector)
        answer = aside.submit(asked, shared, STORY, SLOW | EXPLAIN, key="of-lab")
        inspector.wait("document.getElementById('queue').textContent.includes('of others 1 ')")
        found = explanation_of(answer.result())
        inspector.wait("inspector.state.others.running === 0")
        assert inspector.value("inspector.lives.bySeq.size") == 0
        assert inspector.page.locator("#requests button").count() == 0
        shown = inspector.page.content()
        assert found["id"] not in shown
        assert STORY[:20] not in shown
        assert inspector.explanations == []


def test_of_a_recordings_requests_the_server_is_not_asked(browser, server, tmp_path):
    for inspector in opened(browser, server.url):
        is_live(inspector)
        page = inspector.page
        request_id = explanation_of(asked(server, STORY, SHORT | EXPLAIN))["id"]
        inspector.open_request(request_id)
        inspector.wait("document.querySelector('#explanation dd')")
        page.keyboard.press("Escape")
        with page.expect_download() as download:
            page.click("#save")
        path = tmp_path / "recording.json"
        download.value.save_as(path)
        page.set_input_files("#file", path)
        page.wait_for_selector("#live:not([hidden])")
        page.locator("#moment").press("End")
        inspector.open_request(request_id)
        assert inspector.told("facts")["id"] == request_id
        assert inspector.told() == {}
        assert inspector.explanations == [request_id]


@pytest.mark.parametrize("options", [{}, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_all_is_in_sight(browser, one_row, aside, scheme, options):
    for inspector in opened(browser, one_row.url, color_scheme=scheme, **options):
        is_live(inspector)
        futures = [aside.submit(asked, one_row, STORY * 3 + letter, SHORT | EXPLAIN) for letter in "ABC"]
        found = [explanation_of(future.result()) for future in futures]
        slowest = max(found, key=lambda one: one["phases_ms"]["queued"])
        finished(inspector, slowest["id"])
        inspector.open_request(slowest["id"])
        inspector.wait("document.querySelector('#explanation dd')")
        assert axe_of(inspector.page) == []
        for place in ("document.documentElement", "document.getElementById('request')"):
            assert inspector.value(f"{place}.scrollWidth <= {place}.clientWidth"), place

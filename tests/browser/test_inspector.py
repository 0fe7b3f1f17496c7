"""The inspector in a real Chromium: what it draws of a busy server, time travel, recordings, the tour."""

import json
import random
import re
import threading

import httpx
import pytest

from tests.browser.inspector import STORY, axe_of, opened

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

NUM_ASKING = 6


class Traffic:
    """Threads that ask all the time, while the block lasts."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(index,), daemon=True) for index in range(NUM_ASKING)]

    def __enter__(self) -> "Traffic":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, index: int) -> None:
        rng = random.Random(index)
        with httpx.Client(base_url=self._url, timeout=120.0) as http:
            while not self._is_over.is_set():
                fields = rng.choice(({}, {}, {"n": 2, "temperature": 1}, {"n": 2, "use_beam_search": True}))
                prompt = STORY * rng.randint(1, 2) + str(rng.randint(0, 9))
                body = {"prompt": prompt, "max_tokens": rng.randint(10, 60), "temperature": 0, "ignore_eos": True}
                http.post("/v1/completions", json=body | fields).raise_for_status()


@pytest.fixture(scope="module")
def busy(small):
    with Traffic(small.url):
        yield small


@pytest.fixture
def inspector(browser, busy):
    yield from opened(browser, busy.url)


def test_it_shows_what_happens_as_it_happens(inspector):
    inspector.wait("inspector.numSteps > 60")
    assert inspector.text("#sign") == "live"
    inspector.wait("parseFloat(document.querySelector('#figures > div:nth-child(2) dd').textContent) > 0")
    assert re.fullmatch(r"\d+ of 8", inspector.text("#figures > div:nth-child(3) dd"))
    for canvas in ("#timeline", "#blocks", "#prefixes"):
        assert inspector.colours_in(canvas) > 4
    assert inspector.page.locator("#requests tr button").count() > 0
    assert inspector.page.locator("#log li").count() > 3
    assert re.match(r"Step \d+: \d+ tokens?\. plan ", inspector.text("#phases"))


def test_what_it_shows_is_what_was_asked(browser, server):
    """One request, of which it tells all; and at the end nobody holds anything."""
    for inspector in opened(browser, server.url):
        inspector.wait("document.getElementById('sign').textContent === 'live' && inspector.state.number >= 0")
        before = inspector.value("inspector.state.cached.size")  # of what others asked this server
        body = {"prompt": "Nobody else asks this. " + STORY * 2, "max_tokens": 7, "temperature": 0, "ignore_eos": True}
        usage = server.http.post("/v1/completions", json=body).json()["usage"]
        inspector.wait("inspector.state.log.some(({ kind }) => kind === 'ended')")
        inspector.wait("document.getElementById('log').textContent.includes('ended: length')")
        [row] = inspector.page.locator("#requests tr").all()
        assert row.inner_text().split("\t")[1:] == ["ended", str(usage["prompt_tokens"]), "7", "0"]
        assert inspector.text("#figures > div:nth-child(5) dd") == "0 (0 %)"
        assert inspector.text("#figures > div:nth-child(6) dd") == str(before + (usage["prompt_tokens"] + 6) // 16)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser, busy, scheme):
    for inspector in opened(browser, busy.url, color_scheme=scheme):
        inspector.wait("inspector.numSteps > 30")
        inspector.page.click("#pause")
        assert axe_of(inspector.page) == []
        inspector.page.locator("#requests button").first.click()
        assert axe_of(inspector.page) == []
        inspector.page.keyboard.press("Escape")
        inspector.page.click("#tour")
        inspector.page.wait_for_selector("#scene:not([hidden])")
        assert axe_of(inspector.page) == []


def test_time_stands_still_and_goes_back_and_on(inspector):
    page = inspector.page
    inspector.wait("inspector.numSteps > 100")
    page.click("#pause")
    inspector.wait("document.getElementById('pause').ariaPressed === 'true'")  # with the next frame
    assert inspector.text("#sign") == "paused"
    stopped = inspector.value("inspector.state.number")
    step = inspector.value("inspector.state.step.step")
    inspector.wait("inspector.numSteps > 160")
    assert inspector.value("inspector.state.number") == stopped
    page.click("#back")
    page.click("#back")
    assert inspector.value("inspector.state.step.step") == step - 2
    page.focus("#timeline")
    page.keyboard.press("ArrowRight")
    assert inspector.value("inspector.state.step.step") == step - 1
    page.locator("#moment").press("Home")
    assert inspector.value("inspector.state.number") < stopped
    page.select_option("#speed", "0.25")
    page.click("#play")
    inspector.wait(f"inspector.mode === 'playing' && inspector.state.number > {stopped - 20}")
    page.click("#play")
    assert inspector.value("inspector.mode") == "stopped"
    page.click("#pause")
    assert inspector.value("inspector.mode") == "live"


def test_going_back_shows_what_was_shown_then(inspector):
    """The state that is made from a keyframe is the one that was there."""
    inspector.wait("inspector.numSteps > 40")
    page = inspector.page
    page.click("#pause")
    there = inspector.value("JSON.stringify(inspector.state.snapshot())")
    number = inspector.value("inspector.state.number")
    page.click("#back")
    assert inspector.value("JSON.stringify(inspector.state.snapshot())") != there
    for _ in range(40):
        if inspector.value("inspector.state.number") >= number:
            break
        page.click("#forward")
    again = json.loads(inspector.value("JSON.stringify(inspector.state.snapshot())"))
    if again["number"] == number:
        assert sorted(again["blocks"]["tables"]) == sorted(json.loads(there)["blocks"]["tables"])


def test_a_request_has_a_waterfall(inspector):
    page = inspector.page
    inspector.wait("inspector.numSteps > 40")
    button = page.locator("#requests button").first
    button.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#request[open]")
    assert re.fullmatch(r"Request #\d+", inspector.text("#request-title"))
    assert "Once upon a time" in inspector.text("#texts")
    assert "token" in inspector.text("#facts")
    assert inspector.colours_in("#waterfall") > 4
    page.focus("#texts .said")
    inspector.wait(f"inspector.numSteps > {inspector.value('inspector.numSteps') + 40}")
    assert inspector.value("document.activeElement.className") == "said"  # drawn anew, it is still there
    page.keyboard.press("Escape")
    assert page.locator("#request[open]").count() == 0


def test_blocks_are_told_in_words_and_go_by_keys(inspector):
    page = inspector.page
    inspector.wait("inspector.numSteps > 40")
    page.click("#pause")
    page.focus("#blocks")
    page.keyboard.press("ArrowRight")
    assert inspector.text("#block").startswith("block 1: ")
    page.keyboard.press("ArrowRight")
    assert inspector.text("#block").startswith("block 2: ")


def test_a_recording_is_saved_opened_and_played(inspector, tmp_path):
    page = inspector.page
    inspector.wait("inspector.numSteps > 80")
    page.click("#pause")
    with page.expect_download() as download:
        page.click("#save")
    path = tmp_path / "recording.json"
    download.value.save_as(path)
    raw = json.loads(path.read_text())
    assert (raw["type"], raw["version"], raw["hello"]["model"]) == ("recording", 2, "demo")
    assert all(isinstance(chunk, list) for chunk in raw["chunks"])  # else there was a snapshot in between
    told = [one for chunk in raw["chunks"] for one in chunk]
    numbers = [one["number"] + place for one in told for place, _ in enumerate(one.get("steps", [one]))]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    page.set_input_files("#file", path)
    page.wait_for_selector("#live:not([hidden])")
    assert inspector.text("#sign") == "recording"
    page.click("#play")
    inspector.wait(f"inspector.state.number >= {numbers[-1]}")
    num_steps = sum(len(one.get("steps", [one] if "work" in one else [])) for one in told)
    assert inspector.value("inspector.numSteps") == num_steps
    page.click("#live")
    inspector.wait("inspector.mode === 'live'")


def test_a_recording_keeps_what_is_told_in_runs(browser, server, tmp_path):
    """Of a request alone most steps are told so, their tokens by ids whose texts came before."""
    body = {"prompt": "Once upon a time there was", "max_tokens": 90, "temperature": 0, "ignore_eos": True}
    for inspector in opened(browser, server.url):
        page, path = inspector.page, tmp_path / "recording.json"
        inspector.wait("document.getElementById('sign').textContent === 'live' && inspector.state.number >= 0")
        answer = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        is_there = (
            f"[...inspector.lives.bySeq.values()].some((life) => life.endedUs && life.text === {json.dumps(answer)})"
        )
        inspector.wait(is_there)
        with page.expect_download() as download:
            page.click("#save")
        download.value.save_as(path)
        chunks = json.loads(path.read_text())["chunks"]
        assert sum(len(one["steps"]) for chunk in chunks for one in chunk if "steps" in one) > 50
        page.set_input_files("#file", path)
        page.wait_for_selector("#live:not([hidden])")
        assert inspector.value(is_there)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("no json", "is not JSON"),
        ('{"type": "other"}', "is no recording"),
        ('{"type":"recording","version":9,"hello":{},"snapshot":{"type":"snapshot"},"chunks":[]}', "version 9"),
        (
            '{"type":"recording","version":1,"hello":{},"snapshot":{"type":"snapshot","cards":5},"chunks":[]}',
            "is damaged",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_in_words(inspector, tmp_path, content, problem):
    inspector.wait("inspector.numSteps > 5")
    path = tmp_path / "bad.json"
    path.write_text(content)
    inspector.page.set_input_files("#file", path)
    inspector.page.wait_for_selector("#note:not([hidden])")
    assert problem in inspector.text("#note")
    assert inspector.value("inspector.mode") == "live"


def test_the_tour_goes_from_scene_to_scene(browser, small):
    for inspector in opened(browser, small.url, "/inspect#tour", reduced_motion="reduce"):
        page = inspector.page
        page.wait_for_selector("#scene:not([hidden])")
        titles = []
        while True:
            titles.append(inspector.text("#scene-title"))
            assert inspector.text("#caption")
            assert inspector.colours_in("#timeline") > 3
            if page.is_disabled("#next"):
                break
            place = inspector.text("#scene-place")
            page.click("#next")
            inspector.wait(f"document.getElementById('scene-place').textContent !== {json.dumps(place)}")
        assert len(set(titles)) == 6
        page.click("#before")
        page.click("#leave")
        inspector.wait("inspector.mode === 'live'")


def test_it_asks_for_the_key_and_shows_nothing_without(browser, server_with_key):
    for inspector in opened(browser, server_with_key.url):
        page = inspector.page
        page.wait_for_selector("dialog input[type=password]")
        page.fill("dialog input[type=password]", "sesame")
        page.keyboard.press("Enter")
        inspector.wait("inspector.mode === 'live' && document.getElementById('sign').textContent === 'live'")
        inspector.problems = [one for one in inspector.problems if "401" not in one]


def test_ten_thousand_steps_do_not_grow_the_page(browser, small):
    """What the page keeps is bounded: told of 15,000 steps, it holds no more at the end than in between."""
    for inspector in opened(browser, small.url):
        page = inspector.page
        inspector.wait("document.getElementById('sign').textContent === 'live'")
        session = page.context.new_cdp_session(page)
        page.evaluate(GROWTH_SETUP)
        sizes = []
        for _ in range(6):
            page.evaluate("feedSteps(2500)")
            page.wait_for_timeout(300)
            session.send("HeapProfiler.collectGarbage")
            used = session.send("Runtime.getHeapUsage")["usedSize"]
            sizes.append(used)
        print([f"{size / 1e6:.1f} MB" for size in sizes], inspector.value("grown.history.numSteps"))
        assert inspector.value("grown.history.numSteps") == 15_000
        assert inspector.value("grown.history.numBytes") <= 600_000
        assert sizes[-1] - sizes[2] < 2_000_000


GROWTH_SETUP = """
(async () => {
  const { History } = await import("./ui/inspect/history.js");
  const { Lives } = await import("./ui/inspect/lives.js");
  const { drawTimeline } = await import("./ui/inspect/timeline.js");
  const { drawBlocks } = await import("./ui/inspect/blocks.js");
  const { showLog, showRequests } = await import("./ui/inspect/panels.js");
  const hello = { version: 2, num_blocks: 65, num_host_blocks: 0, num_groups: 1, block_size: 16, max_num_seqs: 4 };
  const history = new History(hello, { maxBytes: 500_000 });
  const lives = new Lives();
  history.onRecord((record, head) => lives.take(record, head));
  const empty = { num_waiting: 0, first: [], hold: "" };
  history.take({ type: "snapshot", number: 0, at_us: 0, num_lost: 0, cards: [], states: [], queue: empty, blocks: {} });
  let number = 0;
  let us = 0;
  window.grown = { history, lives };
  window.feedSteps = (count) => {
    for (let done = 0; done < count; done += 25) {
      const records = [];
      for (let i = 0; i < 25; i += 1) {
        number += 1;
        us += 2000;
        const seq = Math.floor(number / 50);
        const work = { step: number, began_us: us - 1900, phases: [50, 50, 1500, 900, 20, 30], decodes: [seq] };
        const record = { number, at_us: us, work, said: [" word"], blocks: { cached: [1 + (number % 64)] } };
        if (number % 50 === 0) {
          record.cards = [{ seq, request: seq, index: 0, num_prompt: 9, max_tokens: 50, arrived_us: us, own: true }];
          record.admitted = [[seq, 0, "none", []]];
          record.blocks.tables = [[seq, 0, [1 + (seq % 64)]]];
        }
        if (number % 50 === 49) {
          record.moves = [[seq, "ended", "length"]];
          record.blocks.tables = [[seq, 0, []]];
        }
        records.push(record);
      }
      history.take({ type: "records", records });
    }
    const toUs = history.endsUs;
    const shown = { history, lives, fromUs: toUs - 3e6, toUs, cursorUs: null, selected: null };
    drawTimeline(document.getElementById("timeline"), shown);
    drawBlocks(document.getElementById("blocks"), { state: history.head, hello, selected: null });
    showRequests(history.head, lives, hello, { selected: null, select() {} });
    showLog(history.head, history);
    history.at(toUs - 1e6);
  };
})()
"""

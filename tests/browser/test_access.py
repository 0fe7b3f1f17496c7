"""For those who do not see the page, or see it otherwise: axe finds nothing, in light and dark, on a phone."""

import json

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.slow]

RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
}


@pytest.fixture
def check(chat):
    """Asks axe about the page as it stands."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()

    def check(where):
        found = axe.run(chat.page, options=RULES).response["violations"]
        told = [(rule["id"], [node["html"][:160] for node in rule["nodes"]]) for rule in found]
        assert told == [], where

    return check


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_axe_finds_nothing(chat, check, colours):
    page = chat.page
    page.emulate_media(color_scheme=colours, reduced_motion="reduce")
    chat.open()
    check("empty")
    chat.say("What is paged attention?")
    check("an answer")
    chat.setting("Answers side by side").fill("2")
    chat.setting("Show how likely each token was").check()
    chat.setting("The answer is").select_option("JSON, by a schema")
    check("settings")
    page.get_by_role("button", name="Add a tool").click()
    page.get_by_role("button", name="Add an argument").click()
    check("a tool")
    page.get_by_role("button", name="Cancel").click()
    chat.setting("The answer is").select_option("Text")
    chat.close_settings()
    chat.say("Tell me a story about a fox.")
    page.get_by_role("option").nth(3).focus()
    check("side by side, with tokens")
    call = {"index": 0, "id": "c", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    markdown = "### Head\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```js\nlet x\n```\n\n[a](https://example.org/)"
    chat.setting("Answers side by side").fill("1")
    chat.close_settings()
    chat.answers_with({"reasoning": "hm"}, {"content": markdown}, {"tool_calls": [call]}, finish="tool_calls")
    chat.say("All of it")
    page.locator(".thoughts:visible summary").click()
    check("thoughts, markdown and a call")
    page.click("#export")
    check("a dialog")
    page.keyboard.press("Escape")
    chat.act("Edit", message=0)
    check("editing")


def test_axe_finds_nothing_on_a_phone(chat, check):
    """With a link to another page, too, which takes room in the bar."""
    pages = [{"path": "./", "title": "Chat"}, {"path": "inspect", "title": "Inspect"}]
    told = json.dumps({"version": "1", "pages": pages})
    chat.page.route("**/ui/pages.json", lambda route: route.fulfill(body=told, content_type="application/json"))
    chat.page.set_viewport_size({"width": 360, "height": 740})
    chat.open()
    assert chat.page.get_by_role("link", name="Inspect").get_attribute("href") == f"{chat.url}inspect"
    assert chat.page.evaluate("document.querySelector('.bar').scrollWidth <= innerWidth")
    chat.say("What is paged attention?")
    check("an answer")
    for drawer in ("list", "settings"):
        chat.page.click(f"[data-opens={drawer}]")
        check(drawer)
        chat.page.keyboard.press("Escape")


def test_a_screen_reader_is_told_when_an_answer_is_there(chat):
    chat.open()
    chat.say("What is paged attention?")
    assert chat.page.locator("[role=status]#announced").inner_text() == "The answer is complete."
    assert chat.page.get_by_role("article", name="Answer").count() == 1
    assert chat.page.get_by_role("article", name="You").count() == 1


def test_colours_can_be_chosen_and_stay(chat):
    chat.page.emulate_media(color_scheme="light")
    chat.open()
    background = "getComputedStyle(document.documentElement).backgroundColor"
    light = chat.page.evaluate(background)
    switch = chat.page.locator("[data-theme-switch]")
    switch.click()
    assert chat.page.evaluate(background) == light
    switch.click()
    dark = chat.page.evaluate(background)
    assert dark != light
    chat.page.reload()
    assert chat.page.evaluate(background) == dark
    assert switch.get_attribute("aria-label") == "Colours: dark. Change"

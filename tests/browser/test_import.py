"""A conversation that was exported is imported: it goes on as it was, and a file that is none is told what is wrong."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.pages import Chat

pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.slow]

PAGED = "What is paged attention?"


def exported(chat: Chat) -> dict[str, Any]:
    chat.page.click("#export")
    with chat.page.expect_download() as download:
        chat.page.get_by_role("button", name="As JSON").click()
    return json.loads(download.value.path().read_text())


def choose_file(chat: Chat, content: str) -> None:
    with chat.page.expect_file_chooser() as chooser:
        chat.page.get_by_role("button", name="Import a conversation").click()
    chooser.value.set_files([{"name": "a.json", "mimeType": "application/json", "buffer": content.encode()}])


def test_a_conversation_is_imported_and_goes_on(chat):
    """All of its versions and its settings, beside the one that it came from."""
    chat.open()
    chat.setting("System prompt").fill("Be brief.")
    chat.close_settings()
    chat.say(PAGED)
    chat.act("Answer again")
    chat.wait()
    answers = chat.answers()
    kept = json.dumps(exported(chat))
    choose_file(chat, kept)
    chat.until("document.querySelectorAll('.conversation').length === 2")
    assert chat.conversations() == [PAGED, PAGED]
    assert (chat.questions(), chat.answers()) == ([PAGED], answers)
    assert chat.page.get_by_role("img", name="Version 2 of 2").is_visible()
    chat.say("Go on.")
    asked = chat.bodies[-1]["messages"]
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "user"]
    assert asked[2]["content"] == answers[0]
    chat.page.reload()
    chat.page.wait_for_selector(".conversation")
    assert chat.questions() == [PAGED, "Go on."]
    again = exported(chat)["conversation"]
    assert again["id"] != json.loads(kept)["conversation"]["id"]
    assert again["settings"] == json.loads(kept)["conversation"]["settings"]
    assert len(again["nodes"]) == 5


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], str]:
    """A file whose conversation is not as it was."""

    def text(whole: dict[str, Any]) -> str:
        change(whole["conversation"])
        return json.dumps(whole)

    return text


def first(conversation: dict[str, Any]) -> dict[str, Any]:
    return next(iter(conversation["nodes"].values()))


BAD_FILES: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "not JSON": (lambda _: "# What is paged attention?", "It is not JSON"),
    "nothing": (lambda _: "null", "No chat page of aserve has made it"),
    "another's": (lambda _: '{"type": "recording"}', "No chat page of aserve has made it"),
    "another version": (lambda whole: json.dumps({**whole, "version": 2}), "It is of version 2, and this page reads 1"),
    "no conversation": (lambda whole: json.dumps({**whole, "conversation": []}), "The conversation is no object"),
    "no title": (changed(lambda it: it.pop("title")), "“title” is missing"),
    "a text that is none": (changed(lambda it: first(it).update(content={})), "“content” is missing, or not what"),
    "a role that is none": (changed(lambda it: first(it).update(role="system")), "“role” is missing, or not what"),
    "no end": (changed(lambda it: it.update(leaf="0" * 16)), "Its last message is not there"),
    "no beginning": (changed(lambda it: first(it).update(parent="0" * 16)), f"The message {'0' * 16} is not there"),
    "a ring": (changed(lambda it: first(it).update(parent=it["leaf"])), "comes before itself"),
    "a way to nowhere": (changed(lambda it: first(it).update(next="0" * 16)), "goes on with none of its own"),
    "a name that is none": (changed(lambda it: it["nodes"].update(constructor={})), "16 hexadecimal digits"),
    "a failure without words": (changed(lambda it: first(it).update(status="failed")), "“error” is missing"),
    "settings that are none": (
        changed(lambda it: it["settings"].update(numbers=[])),
        "“numbers” is missing, or not what",
    ),
    "a tool that is none": (changed(lambda it: it["settings"].update(tools=[{}])), "“tools” is missing, or not what"),
}


def test_a_file_that_is_none_is_told_what_is_wrong_with_it(chat):
    chat.open()
    chat.say(PAGED)
    whole = json.dumps(exported(chat))
    for name, (file, words) in BAD_FILES.items():
        choose_file(chat, file(json.loads(whole)))
        chat.until(f"document.querySelector('#refused').textContent.includes({json.dumps(words)})", 5000)
        told = chat.page.locator("#refused").inner_text()
        assert told.startswith("The file cannot be imported. "), name
    assert chat.conversations() == [PAGED]
    choose_file(chat, whole)
    chat.until("document.querySelectorAll('.conversation').length === 2")
    assert not chat.page.is_visible("#refused")


def test_what_an_imported_file_says_stays_text(chat):
    """Text that would be HTML, and fields that nobody knows."""
    chat.open()
    chat.say(PAGED)
    whole = exported(chat)
    first(whole["conversation"]).update(content="<img src=x onerror=alert(1)>", onclick="alert(2)")
    choose_file(chat, json.dumps(whole))
    chat.until("document.querySelectorAll('.conversation').length === 2")
    assert chat.questions() == ["<img src=x onerror=alert(1)>"]
    assert all("onclick" not in node for node in exported(chat)["conversation"]["nodes"].values())

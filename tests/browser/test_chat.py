"""The chat page's flows: what a reader does from the first message to the exported file, and what comes of it."""

import json
import re

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.slow]

PAGED = "What is paged attention?"
STORY = "Tell me a story about a fox."


def test_an_answer_streams_and_tells_what_it_took(chat):
    chat.open()
    chat.page.fill("#message", PAGED)
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".answer .prose:not(:empty)")
    chat.wait()
    assert chat.questions() == [PAGED]
    assert chat.answers()[0].startswith("Paged attention keeps the KV cache")
    assert re.match(r"\d+ tokens · .*first after \d+\.\d\d s · prompt of \d+", chat.facts())
    assert chat.conversations() == [PAGED]
    assert chat.page.title() == f"{PAGED} · aserve"
    assert chat.bodies == [
        {
            "messages": [{"role": "user", "content": PAGED}],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ]


def test_an_answer_can_be_stopped(chat, server):
    """Its beginning stays, and the server computes no more of it."""
    chat.open()
    chat.setting("Other fields of the request").fill('{"ignore_eos": true, "temperature": 1}')
    chat.page.fill("#message", STORY)
    chat.page.keyboard.press("Escape")
    chat.page.click("[data-send]")
    chat.until("document.querySelector('.answer > .prose')?.textContent.length > 20")
    chat.page.get_by_role("button", name="Stop").click()
    chat.wait()
    begun = chat.answers()[0]
    assert len(begun) > 20
    assert chat.page.get_by_text("Stopped.", exact=True).is_visible()
    server.wait_until_idle()
    assert chat.answers()[0] == begun


def test_escape_stops_too(chat, server):
    chat.open()
    chat.setting("Other fields of the request").fill('{"ignore_eos": true}')
    chat.page.fill("#message", STORY)
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".answer .prose:not(:empty)")
    chat.page.keyboard.press("Escape")
    chat.wait()
    assert chat.page.get_by_text("Stopped.", exact=True).is_visible()
    server.wait_until_idle()


def test_an_answer_that_was_cut_goes_on(chat):
    """Catches a beginning that is lost, or told twice."""
    chat.open()
    chat.say(STORY)
    [whole] = chat.answers()
    chat.setting("Longest answer").fill("12")
    chat.page.get_by_role("button", name="New conversation", exact=True).click()
    chat.say(STORY)
    [begun] = chat.answers()
    assert whole.startswith(begun)
    assert len(begun) < len(whole)
    chat.setting("Longest answer").fill("")
    chat.act("Go on")
    chat.wait()
    assert chat.answers() == [whole]
    assert chat.page.get_by_role("button", name="Go on").count() == 0


def test_answered_again_both_answers_are_kept(chat):
    chat.open()
    chat.setting("Temperature").fill("1")
    chat.say(STORY)
    [first] = chat.answers()
    chat.act("Answer again")
    chat.wait()
    [second] = chat.answers()
    assert first != second
    assert chat.page.get_by_role("img", name="Version 2 of 2").is_visible()
    chat.act("Version before")
    assert chat.answers() == [first]
    chat.act("Version after")
    assert chat.answers() == [second]
    assert [body["messages"] for body in chat.bodies] == [[{"role": "user", "content": STORY}]] * 2


def test_an_edited_message_is_answered_and_the_old_one_kept(chat):
    chat.open()
    chat.say("What is the prefix cache?")
    [old] = chat.answers()
    chat.act("Edit", message=0)
    chat.page.get_by_label("The message").fill(PAGED)
    chat.page.get_by_role("button", name="Save and answer").click()
    chat.wait()
    assert chat.questions() == [PAGED]
    assert chat.answers()[0].startswith("Paged attention")
    chat.act("Version before", message=0)
    assert (chat.questions(), chat.answers()) == (["What is the prefix cache?"], [old])


def test_an_edited_answer_is_what_the_model_is_told_to_have_said(chat):
    chat.open()
    chat.say(PAGED)
    chat.act("Edit")
    chat.page.get_by_label("The message").fill("It pages.")
    chat.page.get_by_role("button", name="Save", exact=True).click()
    assert chat.answers() == ["It pages."]
    chat.say("Go on.")
    assert chat.bodies[-1]["messages"][1] == {"role": "assistant", "content": "It pages."}


def test_a_fork_shares_what_is_above_and_finds_it_in_the_cache(chat):
    """Catches a fork that changes the conversation that it is from, or that is computed anew."""
    chat.open()
    chat.say(PAGED)
    chat.say(STORY)
    chat.say("What is the prefix cache?")
    before = chat.answers()
    chat.act("Fork: a new conversation from here", message=3)
    assert (chat.questions(), chat.answers()) == ([PAGED, STORY], before[:2])
    assert chat.page.get_by_text("Forked here from").is_visible()
    assert len(chat.conversations()) == 2
    chat.say("What is a block table?")
    assert chat.cached() >= 100
    assert chat.bodies[-1]["messages"][:4] == chat.bodies[-2]["messages"][:4]
    chat.page.locator(".fork-line button").click()
    assert chat.answers() == before


def test_a_fork_at_a_question_can_be_answered_there(chat):
    chat.open()
    chat.say(PAGED)
    chat.say(STORY)
    chat.act("Fork: a new conversation from here", message=2)
    assert (chat.questions(), len(chat.answers())) == ([PAGED, STORY], 1)
    chat.page.get_by_role("button", name="Answer", exact=True).click()
    chat.wait()
    assert len(chat.answers()) == 2
    assert chat.bodies[-1]["messages"] == chat.bodies[-2]["messages"]


def test_more_answers_than_there_may_be_are_one_error(chat):
    chat.open()
    chat.setting("Answers side by side").fill("500")
    chat.say(PAGED)
    assert chat.page.locator(".answer").count() == 1
    assert "n must be" in chat.page.locator(".answer .note").inner_text()


def test_several_answers_stand_side_by_side_and_one_is_gone_on_with(chat):
    chat.open()
    chat.setting("Temperature").fill("1")
    chat.setting("Answers side by side").fill("3")
    chat.close_settings()
    chat.say(STORY)
    answers = chat.answers()
    assert len(answers) == 3
    assert len(set(answers)) > 1
    boxes = [column.bounding_box() for column in chat.page.locator(".column").all()]
    assert len({box["y"] for box in boxes}) == 1
    chat.page.get_by_role("button", name="Go on with answer 2").click()
    assert chat.page.get_by_role("button", name="Answer 2 is chosen to go on with").is_visible()
    chat.say(PAGED)
    assert chat.bodies[-1]["messages"][1]["content"].split() == answers[1].split()
    assert len(chat.answers()) == 1 + 3


def test_one_of_several_answers_is_edited(chat):
    chat.open()
    chat.setting("Answers side by side").fill("2")
    chat.close_settings()
    chat.say(STORY)
    chat.page.locator(".column").nth(1).get_by_role("button", name="Edit").click()
    chat.page.get_by_label("The message").fill("The fox slept.")
    chat.page.get_by_role("button", name="Save", exact=True).click()
    assert chat.answers() == ["The fox slept."]
    assert chat.page.get_by_role("img", name="Version 3 of 3").is_visible()


def test_what_an_answer_on_its_way_forbids_is_said(chat, server):
    chat.open()
    chat.say(PAGED)
    chat.setting("Other fields of the request").fill('{"ignore_eos": true}')
    chat.page.fill("#message", STORY)
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".at-work .prose:not(:empty)")
    chat.act("Edit", message=0)
    chat.page.get_by_label("The message").fill("Another")
    chat.page.get_by_role("button", name="Save and answer").click()
    assert "An answer is on its way" in chat.page.locator("#refused").inner_text()
    assert chat.page.get_by_label("The message").input_value() == "Another"
    chat.page.get_by_role("button", name="Stop").click()
    chat.wait()
    assert not chat.page.is_visible("#refused")
    chat.setting("Other fields of the request").fill("")
    chat.page.get_by_role("button", name="Save and answer").click()
    chat.wait()
    assert chat.questions() == ["Another"]
    server.wait_until_idle()


def test_tokens_show_how_likely_they_were(chat):
    chat.open()
    chat.setting("Show how likely each token was").check()
    chat.setting("The likeliest beside it").fill("4")
    chat.close_settings()
    chat.say(PAGED)
    tokens = chat.page.get_by_role("option")
    assert tokens.count() > 10
    tokens.nth(2).hover()
    card = chat.page.get_by_role("tooltip")
    assert card.locator(".alternative").count() == 4
    assert card.locator(".chosen .percent").inner_text().endswith("%")
    tokens.first.focus()
    chat.page.keyboard.press("ArrowRight")
    chat.page.keyboard.press("ArrowRight")
    assert chat.page.evaluate("document.activeElement.dataset.index") == "2"
    chat.act("Show as text")
    assert chat.answers()[0].startswith("Paged attention keeps")
    chat.act("Show the tokens")
    assert tokens.first.is_visible()
    assert (chat.bodies[0]["logprobs"], chat.bodies[0]["top_logprobs"]) == (True, 4)


def test_an_answer_by_a_schema(chat):
    chat.open()
    chat.setting("The answer is").select_option("JSON, by a schema")
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    chat.setting("JSON Schema").fill(json.dumps({**schema, "additionalProperties": False}))
    chat.close_settings()
    chat.say("Write JSON: name Grace, age 42.")
    text = chat.page.locator(".answer pre code").inner_text()
    assert list(json.loads(text)) == ["name"]
    assert "\n" in text


def test_a_schema_that_is_no_json_is_not_sent(chat):
    chat.open()
    chat.setting("The answer is").select_option("JSON, by a schema")
    chat.setting("JSON Schema").fill("{")
    chat.close_settings()
    chat.page.fill("#message", "Hello")
    chat.page.click("[data-send]")
    assert "not valid JSON" in chat.page.locator("#refused").inner_text()
    assert chat.page.input_value("#message") == "Hello"
    assert (chat.bodies, chat.questions(), chat.conversations()) == ([], [], [])


def test_a_round_of_tools(chat):
    chat.open()
    chat.setting("Model").focus()
    chat.page.get_by_role("button", name="Add a tool").click()
    dialog = chat.page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("get_weather")
    dialog.get_by_label("What it does").fill("Get the weather of a city.")
    dialog.get_by_role("button", name="Add an argument").click()
    dialog.get_by_label("Name of the argument").fill("city")
    dialog.get_by_role("button", name="Save").click()
    chat.close_settings()
    chat.say("What is the weather in Oslo?")
    assert chat.page.locator(".call").inner_text().split() == ["calls", "get_weather", "city", "Oslo"]
    chat.page.fill("#message", "Hurry up")
    chat.page.keyboard.press("Enter")
    assert "waits for the results" in chat.page.locator("#refused").inner_text()
    chat.page.get_by_label("Result of get_weather").fill('{"sky": "sunny", "temperature": 21}')
    chat.page.get_by_role("button", name="Send to the model").click()
    chat.wait()
    assert chat.answers()[-1].startswith("It is sunny in ")
    question, call, result = chat.bodies[-1]["messages"]
    assert question["content"] == "What is the weather in Oslo?"
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert (result["role"], result["tool_call_id"]) == ("tool", call["tool_calls"][0]["id"])
    assert chat.bodies[-1]["tools"][0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }


def test_a_result_that_is_changed_is_answered_anew(chat):
    call = {"index": 0, "id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat.open()
    chat.answers_with({"tool_calls": [call, {**call, "index": 1, "id": "d"}]}, finish="tool_calls")
    chat.say("Add")
    chat.answers_with({"content": "Well."})
    for number, field in enumerate(chat.page.locator(".results textarea").all()):
        field.fill(f"result {number}")
    chat.page.get_by_role("button", name="Send to the model").click()
    chat.wait()
    chat.act("Edit", message=2)
    chat.page.get_by_label("The message").fill("another")
    chat.page.get_by_role("button", name="Save and answer").click()
    chat.wait()
    results = [message["content"] for message in chat.bodies[-1]["messages"] if message["role"] == "tool"]
    assert results == ["another", "result 1"]
    chat.act("Version before", message=2)
    assert chat.page.locator(".result pre").all_inner_texts() == ["result 0", "result 1"]


def test_a_tool_is_written_as_rows_or_as_a_schema(chat):
    chat.open()
    chat.setting("Model").focus()
    chat.page.get_by_role("button", name="Add a tool").click()
    dialog = chat.page.get_by_role("dialog")
    dialog.get_by_label("Name", exact=True).fill("find")
    dialog.get_by_role("button", name="Add an argument").click()
    dialog.get_by_label("Name of the argument").fill("text")
    dialog.get_by_role("button", name="As a JSON Schema").click()
    schema = json.loads(dialog.get_by_label("Arguments as a JSON Schema").input_value())
    assert schema["properties"] == {"text": {"type": "string"}}
    dialog.get_by_label("Arguments as a JSON Schema").fill('{"type": "object", "properties": ')
    dialog.get_by_role("button", name="Save").click()
    assert "Not valid JSON" in dialog.get_by_role("alert").inner_text()
    deep = {"type": "object", "properties": {"in": {"type": "array", "items": {"type": "string"}}}}
    dialog.get_by_label("Arguments as a JSON Schema").fill(json.dumps(deep))
    dialog.get_by_role("button", name="As rows").click()
    assert "Rows cannot say" in dialog.get_by_role("alert").inner_text()
    dialog.get_by_role("button", name="Save").click()
    chat.page.get_by_role("button", name="Change find").click()
    assert json.loads(dialog.get_by_label("Arguments as a JSON Schema").input_value()) == deep
    dialog.get_by_role("button", name="Cancel").click()
    chat.answers_with({"content": "Well."})
    chat.say(PAGED)
    assert chat.bodies[0]["tools"][0]["function"] == {"name": "find", "parameters": deep, "strict": True}
    chat.page.get_by_role("checkbox", name="find").uncheck()
    chat.say(PAGED)
    assert "tools" not in chat.bodies[1]


def test_two_tabs_show_the_same_list(chat):
    chat.open()
    other = chat.context.new_page()
    other.goto(chat.url)
    other.wait_for_selector("#empty h2")
    chat.say(PAGED)
    other.get_by_role("button", name=PAGED).first.click()
    assert other.locator(".bubble").all_inner_texts() == [PAGED]


def test_a_system_prompt_and_numbers_are_sent(chat):
    chat.open()
    chat.setting("System prompt").fill("You are terse.")
    chat.setting("Top-p").fill("0.9")
    chat.setting("Seed").fill("7")
    chat.setting("Stop strings").fill("table\n\\n")
    chat.setting("Longest answer").fill("5")
    chat.say(PAGED)
    body = chat.bodies[0]
    assert body["messages"][0] == {"role": "system", "content": "You are terse."}
    assert (body["top_p"], body["seed"], body["stop"]) == (0.9, 7, ["table", "\n"])
    assert chat.page.get_by_text("Cut at the length that there was room for.").is_visible()
    assert chat.facts().startswith("5 tokens")


def test_conversations_are_kept_over_a_reload_and_can_be_renamed_and_deleted(chat):
    chat.open()
    chat.say(PAGED)
    answers = chat.answers()
    chat.page.get_by_role("button", name="New conversation", exact=True).click()
    assert chat.answers() == []
    chat.say(STORY)
    chat.page.reload()
    chat.page.wait_for_selector("#empty h2", state="attached")
    assert chat.conversations() == [STORY, PAGED]
    assert chat.questions() == [STORY]
    chat.page.locator(".conversation").nth(1).click()
    assert chat.answers() == answers
    chat.page.locator(".conversations li").nth(1).hover()
    chat.page.get_by_role("button", name=f"Rename {PAGED}").click()
    chat.page.get_by_role("dialog").get_by_label("Title").fill("Pages")
    chat.page.get_by_role("dialog").get_by_role("button", name="Save").click()
    chat.until("document.querySelector('.conversation').textContent === 'Pages'")
    chat.page.locator(".conversations li").first.hover()
    chat.page.get_by_role("button", name="Delete Pages").click()
    chat.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    chat.until("document.querySelectorAll('.conversation').length === 1")
    chat.page.reload()
    chat.page.wait_for_selector(".conversation")
    assert chat.conversations() == [STORY]


def test_an_answer_that_was_cut_by_leaving_is_kept_as_far_as_it_came(chat, server):
    chat.open()
    chat.setting("Other fields of the request").fill('{"ignore_eos": true}')
    chat.page.fill("#message", STORY)
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".answer .prose:not(:empty)")
    chat.page.reload()
    chat.page.wait_for_selector(".answer")
    assert chat.page.get_by_text("Stopped.", exact=True).is_visible()
    assert chat.page.get_by_role("button", name="Send").is_visible()
    server.wait_until_idle()


def test_another_conversation_goes_on_while_one_is_answered(chat):
    chat.open()
    chat.setting("Other fields of the request").fill('{"ignore_eos": true, "max_tokens": 1500}')
    chat.page.fill("#message", STORY)
    chat.page.keyboard.press("Enter")
    chat.page.wait_for_selector(".answer .prose:not(:empty)")
    chat.page.get_by_role("button", name="New conversation", exact=True).click()
    chat.setting("Other fields of the request").fill("")
    chat.say(PAGED)
    assert chat.answers()[0].startswith("Paged attention")
    chat.page.locator(".conversation", has_text=STORY).click()
    chat.wait()
    assert chat.facts().startswith("1500 tokens")


@pytest.mark.parametrize("kind", ["Markdown", "JSON"])
def test_a_conversation_is_exported(chat, kind):
    chat.open()
    chat.say(PAGED)
    chat.page.click("#export")
    with chat.page.expect_download() as download:
        chat.page.get_by_role("button", name=f"As {kind}").click()
    text = download.value.path().read_text()
    if kind == "Markdown":
        assert download.value.suggested_filename == "what-is-paged-attention.md"
        assert text == f"# {PAGED}\n\n## You\n\n{PAGED}\n\n## Answer\n\n{chat.answers()[0]}\n"
    else:
        exported = json.loads(text)
        assert exported["request"]["messages"][0]["content"] == PAGED
        assert exported["request"]["messages"][1]["content"] == chat.answers()[0]
        assert exported["conversation"]["title"] == PAGED


def test_it_works_by_the_keyboard_alone(chat):
    """From the first Tab to the second answer, without a pointer."""
    chat.open()
    keys = chat.page.keyboard
    assert chat.page.evaluate("document.activeElement.id") == "message"
    keys.type(PAGED)
    keys.press("Enter")
    chat.wait()
    keys.press("ArrowUp")
    assert chat.page.evaluate("document.activeElement.value") == PAGED
    keys.press("Escape")
    assert chat.page.evaluate("document.activeElement.getAttribute('aria-label')") == "Edit"
    keys.press("/")
    keys.type(STORY)
    keys.press("Shift+Enter")
    keys.type("A short one.")
    keys.press("Enter")
    chat.wait()
    assert chat.bodies[-1]["messages"][-1]["content"] == f"{STORY}\nA short one."
    _tab_to(chat, "Settings")
    keys.press("Enter")
    assert chat.page.is_visible("#settings")
    assert chat.page.evaluate("document.querySelector('#settings').contains(document.activeElement)")
    keys.press("Shift+Tab")
    chat.page.locator("[data-closes=settings]").focus()
    keys.press("Enter")
    assert chat.page.evaluate("document.activeElement.dataset.opens") == "settings"
    keys.press("?")
    assert chat.page.get_by_role("dialog").is_visible()
    keys.press("Escape")
    keys.press("Control+Shift+O")
    assert chat.questions() == []


def _tab_to(chat, name):
    """Walk to the button of that name: it must be among the first fifty stops."""
    for _ in range(50):
        chat.page.keyboard.press("Shift+Tab")
        if chat.page.evaluate("document.activeElement.textContent.trim()") == name:
            return
    raise AssertionError(f"Tab does not lead to {name}")


def test_a_key_is_asked_for_and_kept_in_the_tab(locked):
    """A wrong one is told to be wrong; the right one is kept over a reload, in sessionStorage and nowhere else."""
    locked.page.goto(locked.url)
    dialog = locked.page.get_by_role("dialog")
    dialog.get_by_label("API key").fill("wrong")
    dialog.get_by_role("button", name="Use this key").click()
    locked.page.get_by_text("The key was not accepted.").wait_for()
    dialog.get_by_role("button", name="Cancel").click()
    locked.page.get_by_role("button", name="Enter the key").click()
    dialog.get_by_label("API key").fill("sesame")
    locked.page.keyboard.press("Enter")
    locked.page.wait_for_selector("#empty h2")
    locked.say(PAGED)
    assert locked.answers()[0]
    locked.page.reload()
    locked.page.wait_for_selector(".answer")
    locked.say(STORY)
    assert len(locked.answers()) == 2
    assert locked.page.evaluate("sessionStorage['aserve.key']") == "sesame"
    assert "sesame" not in locked.page.evaluate("JSON.stringify(localStorage)")


def test_on_a_phone_the_lists_stand_in_front_one_at_a_time(phone):
    phone.open()
    page = phone.page
    assert not page.is_visible("#list")
    phone.say(PAGED)
    page.click("[data-opens=list]")
    assert page.is_visible("#list")
    page.locator(".conversation").click()
    assert not page.is_visible("#list")
    page.click("[data-opens=settings]")
    page.get_by_label("Answers side by side").fill("2")
    page.click("#backdrop", position={"x": 5, "y": 300})
    assert not page.is_visible("#settings")
    phone.say(STORY)
    assert page.locator(".column").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_it_works_below_a_root_path(rooted):
    """As behind a proxy that takes the path off, and behind one that does not: all URLs are relative."""
    rooted.open()
    rooted.say(PAGED)
    assert rooted.answers()[0]
    assert {url for url in rooted.requests if "/llm/" not in url} == set()


def test_while_the_server_loads_the_page_says_so_and_goes_on_by_itself(chat):
    loading = {"error": {"message": "the engine is loading: weights 43%", "code": "engine_unavailable", "param": None}}
    answer = {"status": 503, "content_type": "application/json", "body": json.dumps(loading)}
    for path in ("v1/models", "ready"):
        chat.page.route(f"**/{path}", lambda route: route.fulfill(**answer))
    chat.page.goto(chat.url)
    chat.page.get_by_text("The server is not ready: the engine is loading: weights 43%.").wait_for()
    chat.page.unroute("**/v1/models")
    chat.page.wait_for_selector("#empty h2")
    assert not chat.page.is_visible("#status")


def test_a_model_that_pools_has_no_chat(browser, embedder):
    context = browser.new_context()
    page = context.new_page()
    page.goto(embedder.url)
    page.get_by_text("There is no chat here").wait_for()
    assert "v1/embeddings" in page.inner_text("main")
    assert not page.is_visible("#composer")
    context.close()

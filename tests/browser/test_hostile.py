"""What a model, a server or a file may say that is meant to become more than text; and errors, in words."""

import json

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.e2e, pytest.mark.slow]

ATTACKS = [
    "<img src=x onerror='window.owned = 1'>",
    "<script>window.owned = 1</script>",
    "<svg/onload=window.owned=1>",
    "[click](javascript:window.owned=1)",
    "[click](JaVaScRiPt:window.owned=1)",
    "[click](&#106;avascript:window.owned=1)",
    "[click](data:text/html,<script>window.owned=1</script>)",
    "[click](vbscript:x)",
    "[click]( java\tscript:window.owned=1)",
    "![x](https://elsewhere.example/pixel.png)",
    "![x](x' onerror='window.owned=1)",
    "<a href='javascript:window.owned=1'>a</a>",
    "```<img src=x onerror=window.owned=1>\n<img src=x onerror=window.owned=1>\n```",
    "| <img src=x onerror=window.owned=1> | b |\n|---|---|\n| <script>window.owned=1</script> | c |",
    "`<img src=x onerror=window.owned=1>`",
    "**<iframe src='javascript:window.owned=1'></iframe>**",
    "<form action='https://elsewhere.example'><input name=q></form>",
    "<style>body{display:none}</style>",
    "<base href='https://elsewhere.example/'>",
    'https://elsewhere.example/"onmouseover="window.owned=1',
]
MADE_BY_TEXT = (
    "script, img, iframe, object, embed, form, style, base, svg:not(.button svg), link, meta, input, "
    "[onerror], [onload], [style]"
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_a_model_writes_stays_text(chat, attack):
    """In the answer, in its thoughts, in a call; clicked, too, and after a reload."""
    call = {"index": 0, "id": "c", "function": {"name": attack, "arguments": attack}}
    chat.open()
    chat.answers_with({"reasoning": attack}, {"content": attack}, {"tool_calls": [call]})
    chat.say(attack)
    for _ in range(2):
        chat.page.click(".thoughts summary")
        for part in (".prose", ".bubble", ".call"):
            assert chat.page.locator(f"{part} :is({MADE_BY_TEXT})").count() == 0, part
        for link in chat.page.locator(".prose a").all():
            assert link.get_attribute("href").startswith("https://elsewhere.example")
            assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        for words in chat.page.get_by_text("click", exact=True).all():
            words.click()
        assert chat.page.evaluate("window.owned") is None
        chat.page.reload()
        chat.page.wait_for_selector(".answer")


def test_tokens_and_titles_and_names_stay_text(chat):
    attack = "<img src=x onerror='window.owned = 1'>"
    chat.open()
    tokens = [{"token": attack, "logprob": -0.5, "top_logprobs": [{"token": attack, "logprob": -0.5}]}]
    body = [{"index": 0, "delta": {"content": attack}, "logprobs": {"content": tokens}, "finish_reason": "stop"}]
    chat.answers_by(f"data: {json.dumps({'choices': body})}\n\ndata: [DONE]\n\n")
    chat.say(attack)
    chat.page.get_by_role("option").hover()
    assert chat.page.locator(".alternative").inner_text().startswith("<img")
    assert chat.conversations() == [attack]
    assert chat.page.locator("img").count() == 0
    assert chat.page.evaluate("window.owned") is None


def test_markdown_becomes_elements(chat):
    """Catches a renderer that is safe because it renders nothing."""
    text = (
        "# Head\n\nSome **bold**, *slanted*, ~~gone~~ and `code`; 2 * 3 * 4, a_b_c, \\*plain\\*.\n\n"
        "1. one\n2. two\n   - inner\n\n> quoted\n\n```python\nx = '<b>'\n```\n\n"
        "| a | b |\n|---|---|\n| 1 | 2 |\n\n---\n"
        "See [this](https://example.org/a?b=c&d) or https://example.org/x."
    )
    chat.open()
    chat.answers_with({"content": text[:40]}, {"content": text[40:]})
    chat.say("Show me")
    prose = chat.page.locator(".answer .prose").last

    def found(selector):
        return prose.locator(selector).all_inner_texts()

    assert (found("h3"), found("strong"), found("em"), found("del")) == (["Head"], ["bold"], ["slanted"], ["gone"])
    assert found("p code") == ["code"]
    assert found("ol > li")[0] == "one"
    assert found("ol ul li") == ["inner"]
    assert (found("blockquote"), found("pre")) == (["quoted"], ["x = '<b>'"])
    assert (found("th"), found("td")) == (["a", "b"], ["1", "2"])
    assert prose.locator("hr").count() == 1
    assert "2 * 3 * 4, a_b_c, *plain*." in found("p")[0]
    addresses = [link.get_attribute("href") for link in prose.locator("a").all()]
    assert addresses == ["https://example.org/a?b=c&d", "https://example.org/x"]


@pytest.mark.parametrize(
    "text", ["*" * 20_000, "[" * 20_000, "`" * 20_001, "> " * 5_000, "|a" * 5_000 + "\n" + "|-" * 5_000]
)
def test_a_text_made_to_take_long_does_not(chat, text):
    chat.open()
    chat.page.set_default_timeout(5_000)
    chat.answers_with({"content": text})
    chat.say("Go")
    assert chat.page.locator(".answer").count() == 1


@pytest.mark.parametrize(
    ("status", "error", "headers", "title"),
    [
        (429, {"message": "64 wait", "code": "engine_overloaded"}, {"Retry-After": "7"}, "Try again in 7 seconds."),
        (429, {"message": "used up", "code": "rate_limit_exceeded"}, {"Retry-After": "1"}, "The limit of this key"),
        (503, {"message": "the engine is loading"}, {"Retry-After": "1"}, "The server is not ready"),
        (400, {"message": "seed: no", "param": "seed"}, {}, "The server does not take this seed"),
        (
            400,
            {"message": "9 > 8", "param": "messages", "code": "context_length_exceeded"},
            {},
            "too long for the model",
        ),
        (404, {"message": "no such model", "code": "model_not_found"}, {}, "does not know this model"),
        (413, {"message": "too large"}, {}, "larger than the server takes"),
        (500, {"message": "fault ab12"}, {}, "The server failed"),
    ],
)
def test_errors_are_told_in_words_and_can_be_tried_again(chat, status, error, headers, title):
    chat.open()
    chat.answers_with({"param": None, "code": None, **error}, status=status, headers=headers)
    chat.say("Hello")
    note = chat.page.locator(".answer .note")
    assert title in note.inner_text()
    assert error["message"] in note.inner_text()
    chat.answers_with({"content": "Well now."})
    note.get_by_role("button", name="Try again").click()
    chat.wait()
    assert chat.answers() == ["Well now."]
    assert chat.page.locator(".versions").count() == 0


def test_the_field_that_is_wrong_is_shown(chat):
    """By the server itself."""
    chat.open()
    chat.setting("Temperature").fill("7")
    chat.close_settings()
    chat.say("Hello")
    assert "temperature must be in [0, 2]" in chat.page.locator(".answer .note").inner_text()
    chat.page.get_by_role("button", name="Show the setting").click()
    assert chat.page.evaluate("document.activeElement.value") == "7"


def test_an_error_in_the_stream_and_an_end_before_the_end(chat):
    chat.open()
    head = 'data: {"choices": [{"index": 0, "delta": {"content": "Half"}, "finish_reason": null}]}\n\n'
    for rest, title in (
        ('data: {"error": {"message": "fault ab12", "code": "engine_error", "param": null}}\n\n', "The server failed"),
        ("", "The server cannot be reached"),
    ):
        chat.answers_by(head + rest)
        chat.say("Hello")
        assert chat.answers()[-1] == "Half"
        assert title in chat.page.locator(".answer .note").last.inner_text()


def test_a_server_that_is_gone_is_told(chat):
    chat.open()
    chat.page.route("**/v1/chat/completions", lambda route: route.abort())
    chat.say("Hello")
    assert "The server cannot be reached" in chat.page.locator(".answer .note").inner_text()

import datetime
import json
import time
import tracemalloc
from contextlib import suppress
from enum import Enum

import pytest

from aserve.core.errors import CheckpointError, ConfigError, InvalidRequestError
from aserve.text.chat_template import ChatTemplate
from aserve.text.template_sandbox import MAX_NUMBER_CHARS, TemplateSandbox
from tests.text import checkpoints, templates
from tests.text.templates import ASK, TALK

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ECHO = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def template(source, **options):
    return ChatTemplate({"default": source}, TOKENS, **options)


def refusal(source, messages=ASK, **options):
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render(messages, **options)
    return caught.value


def test_chatml():
    text = template(templates.CHATML).render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_mistral_without_a_generation_prompt():
    text = template(templates.MISTRAL).render(TALK[:2], add_generation_prompt=False)
    assert text == '<s>[INST] What is 2 < 3 & "é" 🤖?\n [/INST]\nTrue.</s>\n'


def test_todays_date_is_at_hand():
    assert template("{{ strftime_now('%Y') }}").render(ASK) == str(datetime.date.today().year)


def test_tojson_keeps_order_and_characters():
    value = {"z": "é<>&'", "a": [1, 2.5, None, True]}
    assert template("{{ tools[0] | tojson }}").render(ASK, tools=[value]) == json.dumps(value, ensure_ascii=False)
    indented = template("{{ tools[0] | tojson(indent=2) }}").render(ASK, tools=[value])
    assert indented == json.dumps(value, ensure_ascii=False, indent=2)


def test_text_parts_are_joined_by_newlines():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert template(ECHO).render([{"role": "user", "content": parts}]) == "[user:one\ntwo]"


def test_a_member_of_an_enum_is_told_as_its_value():
    """Catches a role or a text that a template spells by its name."""
    word = Enum("Word", {"ROLE": "user", "SAID": "hello"}, type=str)
    for content in (word.SAID, [{"type": "text", "text": word.SAID}]):
        assert template(ECHO).render([{"role": word.ROLE, "content": content}]) == "[user:hello]"


def test_an_assistant_may_have_said_nothing():
    assert template(ECHO).render([{"role": "assistant", "content": None}]) == "[assistant:]"
    calling = [{"role": "assistant", "content": None, "tool_calls": [{}]}]
    for empty in ("", [{"type": "text", "text": ""}], []):  # as clients have it that add up a stream
        emptied = [{**calling[0], "content": empty}]
        assert template(ECHO).render(emptied) == template(ECHO).render(calling)
    assert template("{{ messages[0].content is none }}").render(calling) == "True"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}, "not supported"),
        ({"role": "user", "content": ["text"]}, "not supported"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "needs a string"),
        ({"role": "user", "content": None}, "must be a string"),
        ({"role": "user", "content": 1}, "must be a string"),
        ({"role": "user"}, "must be a string"),
        ({"role": "root", "content": "x"}, "role must be one of"),
        ({"content": "x"}, "role must be one of"),
    ],
)
def test_messages_that_cannot_be_read(message, words):
    error = refusal(ECHO, [message])
    assert error.param == "messages"
    assert words in error.message


def test_an_empty_conversation():
    assert refusal(ECHO, []).param == "messages"


def test_no_template():
    with pytest.raises(InvalidRequestError, match="has no chat template") as caught:
        ChatTemplate({}, TOKENS).render(ASK)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ 'a' + messages[0].missing }}", "no attribute 'missing'"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ 1 // 0 }}", "division"),
        ("{% if %}", "malformed: "),
        ("{{ messages | no_such_filter }}", "malformed: "),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "malformed: "),
        ("{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "malformed: "),
        ("{{ 5 | dictsort }}", "refuses"),
        ("{{ raise_exception('long ' * 1000) }}", "long long"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__ }}{{ namespace.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_what_goes_wrong_in_a_template_is_the_requests_error(source, words):
    error = refusal(source)
    assert error.param == "messages"
    assert words in error.message
    assert len(error.message) < 300
    assert "\n" not in error.message


DOUBLED = "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ 'a' * 1000000000 }}",
    "{{ [0] * 1000000000 }}",
    "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s | replace('a', n.s) %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s.replace('a', n.s) %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s.join(n.s) %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s | join(n.s) %}{% endfor %}",
    f"{DOUBLED}{{{{ n.l }}}}",
    f"{DOUBLED}{{{{ n.l | tojson }}}}",
    f"{DOUBLED}{{{{ n.l | string }}}}",
    f"{DOUBLED}{{{{ '%s' % n.l }}}}",
    f"{DOUBLED}{{{{ '{{}}'.format(n.l) }}}}",
    "{% set n = namespace(i=7) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    pytest.param(
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        marks=pytest.mark.slow,
    ),
    "{% set s %}{% for i in range(100000) %}" + "a" * 10_000 + "{% endfor %}{% endset %}",
    "{% macro f() %}{% for i in range(100000) %}" + "a" * 10_000 + "{% endfor %}{% endmacro %}{% set s = f() %}",
    "{% for i in [[1], [2]] recursive %}{{ loop(i) }}{% endfor %}",
    "{% for i in range(100000) %}{{ range(100000) | max }}{% endfor %}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.encode().ljust(1000000000) }}",
    "{{ (1).to_bytes(1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a\n' | indent(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ lipsum(n=1000000) }}",
    f"{DOUBLED}{{{{ n.l == n.l + [] }}}}",
    f"{DOUBLED}{{{{ [n.l, n.l] | max }}}}",
    f"{DOUBLED}{{{{ [n.l].count([n.l]) }}}}",
    f"{DOUBLED.replace('[', '(').replace(']', ',)')}{{{{ {{n.l: 1}} }}}}",
    f"{DOUBLED.replace('[', '(').replace(']', ',)')}{{{{ {{}}.get(n.l) }}}}",
    f"{DOUBLED.replace('[', '(').replace(']', ',)')}{{{{ {{}}[n.l] }}}}",
]
OFTEN = "{% for i in range(99999) %}"
MUCH = "{% set s = 'a' * 4000000 %}{% set t = [0] * 2000000 %}"
HEAVY = [
    "{% set n = namespace(x=7) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x=7) %}" + OFTEN + "{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(s=[0]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='🤖') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(l=[]) %}" + OFTEN + "{% set n.l = [n.l, [0] * 60000] %}{% endfor %}",
    "{% set n = namespace(l=[]) %}" + OFTEN + "{% set n.l = [n.l, range(100000) | list] %}{% endfor %}",
    "{% set x = [0] * 20000000 %}",
    "{% set x = '9' * 4000000 %}{{ x | int }}",
    "{% set x = ('9' * 4000000) | int(base=16) %}",
    "{% set x = 'ΐ' * 4000000 %}{{ x.upper() }}",
    "{% set x = ('&' | safe) * 60000000 %}",
    "{% set x = ('ab ' * 2000000).split() %}",
    "{% set x = ('漢字' * 2000000) | list %}",
    "{% set x = ('a ' * 2000000) | title %}",
    "{% set x = ('a\\n' * 2000000) | indent(900) %}",
    "{% set x = ([0] * 200000) | tojson(indent=999) %}",
    "{% set x = ('{0}' * 100000).format('a' * 100000) %}",
    "{% set x = ('%(a)s' * 100000) % {'a': 'a' * 100000} %}",
    "{% set x = strftime_now('%c' * 1000000) %}",
    "{% macro f() %}{{ varargs | length }}{% endmacro %}{{ f(*('a' * 4000000)) }}",
    pytest.param(OFTEN + "{{ loop.cycle(*range(99999)) }}{% endfor %}", marks=pytest.mark.thorough),
    pytest.param(OFTEN + "{% set c = cycler(*range(100000)) %}{% endfor %}", marks=pytest.mark.thorough),
    pytest.param(
        "{% set n = namespace(d={}) %}" + OFTEN + "{% set n.d = dict(n.d, **{i | string: i}) %}{% endfor %}",
        marks=pytest.mark.thorough,
    ),
    OFTEN + "{% if i %}{% endif %}" * 300 + "{% endfor %}",
    *(
        MUCH + OFTEN + "{% set x = " + expression + " %}{% endfor %}"
        for expression in (
            *("s[1:]", "t[1:]", "s[::-1]", "s == s ~ 'a'", "1 in t", "'b' in s", "s is lower", "s is eq(s ~ 'a')"),
            *("1 is in(t)", "s | wordcount", "s | float", "t | max", "t | sort", "s | e", "t.count(1)", "t.copy()"),
            "s | reverse",
        )
    ),
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_hostile_template_is_stopped(source):
    with pytest.raises(InvalidRequestError):
        template(source, max_chars=2**16).render(ASK)


@pytest.mark.parametrize("source", HEAVY)
def test_what_a_template_does_is_charged_before_it_is_done(source):
    """With the budget that is used in earnest: within a second of processor time, and 64 MiB."""
    hostile = template(source)
    tracemalloc.start()
    try:
        with suppress(InvalidRequestError):
            hostile.render(ASK)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    start_s = time.thread_time()
    with pytest.raises(InvalidRequestError):
        hostile.render(ASK)
    assert time.thread_time() - start_s < 1.0
    assert peak_bytes < 64 * 2**20


def test_filters_that_take_other_filters_and_tests():
    source = (
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | map('trim') | join('|') }}"
    )
    assert template(source).render(TALK) == 'What is 2 < 3 & "é" 🤖?|Why?'
    assert template("{{ messages | rejectattr('role', 'in', ['user']) | list | length }}").render(TALK) == "1"


def test_what_templates_do_with_lists_numbers_and_slices():
    for source, text in [
        (
            "{% set n = namespace(l=[]) %}{% for m in messages %}{% set n.l = n.l + [m.role] %}{% endfor %}{{ n.l }}",
            None,
        ),
        ("{{ messages[1:] | length }}{{ messages[::-1][0].content | trim }}", "2Why?"),
        ("{% for m in messages if m.role != 'user' %}{{ loop.index0 * 2 - 1 }}{% endfor %}", "-1"),
        (
            "{% set a, b = 1, messages[0].role %}{{ a + 1 }}{{ b }}{{ '%02d' % 7 }}{{ '{:.1f}'.format(2.5) }}",
            "2user072.5",
        ),
        ("{{ dict(a=1).items() | list }}{{ {messages[0].role: [1]} }}", "[('a', 1)]{'user': [1]}"),
        ("{{ 1 < messages | length <= 3 }}{{ messages[0] in messages }}{{ 'a' not in 'abc' }}", "TrueTrueFalse"),
    ]:
        assert template(source).render(TALK) == (text or "['user', 'assistant', 'user']")


def test_a_text_is_as_long_as_is_allowed_and_no_longer():
    messages = [{"role": "user", "content": "a" * 93}]
    assert len(template(ECHO, max_chars=100).render(messages)) == 100
    with pytest.raises(InvalidRequestError, match="over 99 characters"):
        template(ECHO, max_chars=99).render(messages)


def test_ten_thousand_messages_are_no_bomb():
    assert len(template(templates.ZEPHYR).render(ASK * 10_000)) > 10_000


def test_continuing_the_last_message_cuts_after_it():
    text = template(templates.CHATML).render(
        templates.UNFINISHED, add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("<|im_start|>assistant\nIt is ")
    trimmed = template(templates.GEMMA).render(
        templates.UNFINISHED, add_generation_prompt=False, continue_final_message=True
    )
    assert trimmed.endswith("<start_of_turn>model\nIt is")


def test_what_cannot_be_continued():
    continued = {"add_generation_prompt": False, "continue_final_message": True}
    assert refusal(ECHO, ASK, continue_final_message=True).param == "continue_final_message"
    assert "drops the last" in refusal("nothing", ASK, **continued).message
    assert "no text" in refusal(ECHO, [{"role": "assistant", "content": None}], **continued).message


def test_variables_are_those_that_the_template_reads():
    chatml = template(templates.CHATML)
    assert chatml.render(ASK, variables={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")
    for name in ("tokenize", "bos_token", "documents", "raise_exception", "self"):
        with pytest.raises(InvalidRequestError, match=r"takes no variable .*enable_thinking\)") as caught:
            chatml.render(ASK, variables={name: True})
        assert caught.value.param == "chat_template_kwargs"


def test_with_tools_the_template_for_tools_is_taken():
    both = ChatTemplate({"default": "plain", "tool_use": "tools"}, TOKENS)
    assert (both.render(ASK), both.render(ASK, tools=templates.TOOLS)) == ("plain", "tools")
    assert template("plain").render(ASK, tools=templates.TOOLS) == "plain"


def test_where_a_checkpoint_has_its_template(tmp_path):
    assert_none = ChatTemplate.load(tmp_path)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        assert_none.render(ASK)
    config = {"chat_template": "config{{ eos_token }}", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(ASK) == "config</s>"
    config["chat_template"] = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(ASK, tools=[{}]) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path).render(ASK, tools=[{}]) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file for tools")
    assert ChatTemplate.load(tmp_path).render(ASK, tools=[{}]) == "file for tools"


@pytest.mark.parametrize(
    "config", ["[]", "{", '{"chat_template": [1]}', '{"added_tokens_decoder": {"1": 2}}', "\ud800"]
)
def test_a_malformed_config_is_named(tmp_path, config):
    (tmp_path / "tokenizer_config.json").write_bytes(config.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


def test_a_real_tokenizer_encodes_the_rendered_chat_without_adding_to_it():
    tokenizer = checkpoints.byte_level()
    token_ids = tokenizer.encode(template(templates.CHATML).render(ASK), add_special_tokens=False)
    assert tokenizer.token_strings(token_ids)[0] == "<|im_start|>"


def test_a_template_file_replaces_the_folders_templates(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("the folder's")
    (mine := tmp_path / "mine.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    messages = [{"role": "user", "content": "hi"}]
    assert ChatTemplate.load(tmp_path).render(messages) == "the folder's"
    assert ChatTemplate.load(tmp_path, mine).render(messages) == "<s>hi"
    with pytest.raises(ConfigError, match="chat_template: cannot read"):
        ChatTemplate.load(tmp_path, tmp_path / "none.jinja")


@pytest.mark.parametrize(("width", "is_refused"), [("", False), ("(1)", True), ("(width=1)", True)])
def test_a_text_that_is_indented_is_charged_by_its_lines(width, is_refused):
    """Caught: another product than lines times width; a width that is given is charged as the widest there is."""
    lines = template("{% set x = ('a\n' * 100000) | indent" + width + " %}")
    if is_refused:
        with pytest.raises(InvalidRequestError, match="it makes over 67108864 bytes"):
            lines.render(ASK)
    else:
        assert lines.render(ASK) == ""


def test_characters_of_any_language_change_their_case():
    """Millions of them cost bytes, not steps."""
    source = "{{ 'É'.lower() }}{{ 'straße' | upper }}{{ 'ÀB' | capitalize }}{{ 'ß'.casefold() }}{{ 'Éa'.swapcase() }}"
    assert template(source).render(ASK) == "éSTRASSEÀbsséA"
    assert template("{% set x = ('é' * 2000000) | upper %}").render(ASK) == ""


def test_a_template_that_is_warm_is_not_compiled_any_more(monkeypatch):
    warm, malformed = template("{{ messages[0].role }}"), template("{{")
    warm.warm_up()
    malformed.warm_up()
    monkeypatch.setattr(TemplateSandbox, "compile_template", None)
    assert warm.render(ASK) == "user"


def test_numbers_are_read_from_texts_of_so_many_characters_and_no_more():
    few = template("{{ ' 7' | int + 1 }} {{ '2.5' | float }} {{ 'ff' | int(base=16) }} {{ none | int }}")
    assert few.render(ASK) == "8 2.5 255 0"
    read = "{% set x = ('9' * " + str(MAX_NUMBER_CHARS) + ") | float %}ok"
    assert template(read).render(ASK) == "ok"
    assert "a number of over" in refusal(read.replace("* ", "* 1")).message

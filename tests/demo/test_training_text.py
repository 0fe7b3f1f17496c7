"""The text that the demo model is trained on is right, well formed and repeatable, and so is its tokenizer."""

import ast
import json
import operator
import re
from itertools import islice, pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from aserve.text.chat_template import ChatTemplate
from scripts.demo_text.arithmetic import BEYOND_THE_TABLES
from scripts.demo_text.compose import TOPICS, Document, documents
from scripts.demo_text.dialogues import TOOL_PARAMETERS
from scripts.demo_text.stories import HEROES
from tests.demo.questions import HELD_OUT, QUESTIONS, STORIES, WEATHER_TOOLS, ask

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "aserve/demo"
HELD_OUT_TEXTS = frozenset(messages[-1]["content"] for messages, _ in HELD_OUT)
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def sample() -> list[Document]:
    return list(islice(documents(7, HELD_OUT_TEXTS), 6000))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def exchanges(sample: list[Document]) -> list[tuple[str, str]]:
    """(what the user asks, what the assistant answers), everywhere in the sample."""
    return [
        (first["content"], second["content"])
        for document in sample
        for first, second in pairwise(document.messages)
        if first["role"] == "user" and second["role"] == "assistant"
    ]


def test_a_seed_gives_the_same_text_again() -> None:
    assert list(islice(documents(3), 200)) == list(islice(documents(3), 200))
    assert list(islice(documents(3), 200)) != list(islice(documents(4), 200))


def test_held_out_questions_are_never_taught(sample: list[Document]) -> None:
    assert len(HELD_OUT_TEXTS) == len(HELD_OUT)
    assert not HELD_OUT_TEXTS & {question for question, _ in exchanges(sample)}


def test_a_question_of_the_text_is_left_out_when_it_is_held_out() -> None:
    held_out = frozenset({"Hello!"})
    assert any(question in held_out for question, _ in exchanges(list(islice(documents(1), 3000))))
    assert not any(question in held_out for question, _ in exchanges(list(islice(documents(1, held_out), 3000))))


def test_turns_alternate_and_the_assistant_has_the_last_word(sample: list[Document]) -> None:
    for document in sample:
        if not document.text:
            roles = [m["role"] for m in document.messages if m["role"] != "system"]
            assert roles[0] == "user"
            assert roles[-1] == "assistant"
            assert all((a == "assistant") != (b == "assistant") for a, b in pairwise(roles)), roles


def test_every_sum_is_right(sample: list[Document]) -> None:
    sums = [m for _, answer in exchanges(sample) if (m := re.match(r"(\d+) ([-+*]) (\d+) = (-?\d+)(.*)", answer))]
    assert len(sums) > 500
    for found in sums:
        a, op, b, result, rest = found.groups()
        assert OPERATORS[op](int(a), int(b)) == int(result)
        assert rest == "." or f" {result} " in rest


def test_only_sums_outside_the_tables_are_declined(sample: list[Document]) -> None:
    declined = [question for question, answer in exchanges(sample) if answer == BEYOND_THE_TABLES]
    assert len(declined) > 50
    for question in declined:
        assert max(map(int, re.findall(r"\d+", question))) > 20 or re.search(r"/|[Dd]ivide", question), question


def test_every_json_answer_is_valid_and_nothing_else(sample: list[Document]) -> None:
    answers = [answer for question, answer in exchanges(sample) if "JSON" in question]
    assert len(answers) > 100
    for answer in answers:
        assert json.dumps(json.loads(answer)) == answer


def test_tool_calls_name_an_offered_tool_and_its_parameters(sample: list[Document]) -> None:
    calls = [(d, m["tool_calls"][0]["function"]) for d in sample for m in d.messages if m.get("tool_calls")]
    assert len(calls) > 100
    for document, call in calls:
        assert call["name"] in {tool["function"]["name"] for tool in document.tools}
        assert call["arguments"].keys() == TOOL_PARAMETERS[call["name"]].keys()


def test_a_story_is_about_its_hero_and_takes_a_while(sample: list[Document]) -> None:
    stories = [(q, a) for q, a in exchanges(sample) if "there lived" in a]
    assert len(stories) > 50
    for _, story in stories:
        (hero,) = [name for name in HEROES.values() if story.count(name) >= 4]
        assert 7 <= len(re.findall(r'[.!]"?(?= |$)', story)) <= 11, (hero, story)


def test_no_topic_shares_a_question_with_another() -> None:
    answers: dict[str, set[str]] = {}
    for topic in TOPICS:
        for said in (*topic.names, *topic.questions):
            answers.setdefault(said.lower(), set()).add(topic.answer)
    assert {said: found for said, found in answers.items() if len(found) > 1} == {}


def test_every_fixed_answer_is_composed_or_taught(sample: list[Document]) -> None:
    """What the model must answer is what the text says; sums, names and echoes are of the moment, so of any wording."""
    taught = {answer for _, answer in exchanges(sample)}
    free = re.compile(r"\d+ [-+*] \d+ = |Your name is|The capital of|silver river|<tool_call>|\{")
    missing = [expected for _, expected in QUESTIONS + HELD_OUT if expected not in taught and not free.match(expected)]
    assert missing == []
    assert len(QUESTIONS) >= 30
    assert len(STORIES) >= 3


@pytest.mark.parametrize(
    "text",
    [
        "What is paged attention?",
        "17+25 = 42",
        "  two  spaces\n\ttab\r\n",
        "café 😀 漢字 \x00",
        "def f(x):\n    return x",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_an_operand_of_the_tables_is_one_token_wherever_it_stands(tokenizer: Tokenizer) -> None:
    for number in map(str, range(21)):
        assert tokenizer.encode(f"{number}+1 is {number}.").tokens[:3] == [number, "+", "1"]
        assert number in tokenizer.encode(f" {number}.").tokens


def test_numbers_are_split_every_two_digits(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("121314").tokens == ["12", "13", "14"]


def test_markup_is_one_token_each(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>").ids == [0, 1, 2]


def test_the_bundled_template_is_the_one_that_was_trained_with() -> None:
    source = (ROOT / "scripts/demo_text/chat_template.jinja").read_text()
    assert (DEMO / "chat_template.jinja").read_text().rstrip("\n") == source.rstrip("\n")


def test_the_template_writes_roles_tools_calls_and_results() -> None:
    template = ChatTemplate.load(DEMO)
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages = [
        *ask("Weather in Oslo?", system="Be concise."),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": '{"sky": "sunny"}'},
    ]
    assert template.render(messages, tools=[WEATHER_TOOL]) == (
        f"<|im_start|>system\nBe concise.\n\n{WEATHER_TOOLS}<|im_end|>\n"
        "<|im_start|>user\nWeather in Oslo?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
        "<|im_end|>\n"
        '<|im_start|>user\n<tool_response>\n{"sky": "sunny"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_arguments_given_as_text_are_written_as_they_are() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [*ask("Go."), {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    text = ChatTemplate.load(DEMO).render(messages, add_generation_prompt=False)
    one = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert text.endswith(f"<|im_start|>assistant\n{one}\n{one}<|im_end|>\n")


def test_the_bundled_folder_is_small_and_holds_data_only() -> None:
    files = {file.name: file.stat().st_size for file in DEMO.iterdir()}
    assert sum(files.values()) < 8_000_000
    assert {Path(name).suffix for name in files} <= {".json", ".jinja", ".safetensors"}


def test_the_training_script_reads_questions_without_importing_tests() -> None:
    """runpy reads questions.py as a script: it must not import anything of this repository."""
    tree = ast.parse((ROOT / "tests/demo/questions.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"typing"}

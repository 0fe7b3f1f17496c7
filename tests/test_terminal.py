"""The terminal: loading as a person sees it, and a line to try."""

import io
import json

import pytest

from aserve.core.pooling import Pooling
from aserve.engine import Progress
from aserve.terminal import StartupPrinter, curl_line, try_lines


def printed(*reports: Progress) -> str:
    file = io.StringIO()
    printer = StartupPrinter(file)
    for progress in reports:
        printer.report(progress)
    printer.close()
    printer.close()
    return file.getvalue()


def test_each_stage_is_a_line():
    stages = ("loading torch", "loading torch", "tokenizer")
    assert printed(*map(Progress, stages)) == "loading torch\ntokenizer\n"


def test_a_stage_with_parts_is_a_bar():
    text = printed(Progress("one"), Progress("weights", 0, 3), Progress("weights", 3, 3), Progress("memory"))
    assert "3.00k/3.00k" in printed(Progress("weights", 0, 3072, "B"), Progress("weights", 3072, 3072, "B"))
    assert text.startswith("one\n")
    assert "weights: 100%" in text
    assert "3/3" in text
    assert text.endswith("memory\n")


@pytest.mark.parametrize(
    ("task", "path"),
    [(None, "/v1/chat/completions"), ("embed", "/v1/embeddings"), ("classify", "/classify"), ("reward", "/pooling")],
)
def test_the_example_is_a_request_that_the_server_answers(task, path):
    """Caught: a server that pools proposed a chat, which it refuses."""
    pooling = None if task is None else Pooling(task=task, method="last", size=4, activation="none")
    line = curl_line("http://here:1", pooling, needs_key=True)
    assert line.startswith(f'curl -N http://here:1{path} -H "Authorization: Bearer $ASERVE_API_KEY" ')
    body = json.loads(line.rpartition(" -d ")[2].strip("'"))
    assert ("messages" if task is None else "input") in body


def test_a_server_on_a_path_is_asked_there_and_has_no_page_in_a_browser():
    [line] = try_lines("unix:/a/socket", None, needs_key=False, has_page=True)
    assert line.startswith("  curl -N --unix-socket /a/socket http://localhost/v1/chat/completions ")
    assert len(try_lines("https://here:1", None, needs_key=False, has_page=True)) == 2

"""What is read from recorded answers: token times, counts, and errors."""

import json

import pytest

from aserve.load.answers import parse
from aserve.load.http import Answer, AnswerError


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text, finish_reason=None):
    return event(choices=[{"text": text, "index": 0, "finish_reason": finish_reason}])


def streamed(*reads):
    return Answer(10.0, 200, list(reads))


def test_token_times_are_those_of_the_reads_that_completed_the_events():
    split = token(" b")
    answer = streamed(
        (11.0, token(" a") + split[:9]), (12.0, split[9:]), (14.0, token(" c", "length") + b"data: [DONE]\n\n")
    )
    sample = parse(answer, due_s=9.0, stream=True)
    assert sample.event_s == [11.0, 12.0, 14.0]
    assert (sample.ttft_s, sample.latency_s, sample.gaps_s, sample.s_per_token) == (2.0, 5.0, [1.0, 2.0], 1.5)
    assert (sample.num_in, sample.num_out, sample.num_reads) == (0, 3, 3)


def test_usage_counts_the_tokens_and_a_closing_event_is_none():
    usage = {"prompt_tokens": 7, "completion_tokens": 5}
    reads = [
        (11.0, token(" a b") + token("")),
        (12.0, token(" c")),
        (13.0, token("", "stop") + event(choices=[], usage=usage)),
    ]
    sample = parse(streamed(*reads), due_s=10.0, stream=True)
    assert (sample.num_in, sample.num_out, len(sample.event_s), sample.num_reads) == (7, 5, 3, 2)


def test_lines_may_end_as_in_http():
    body = (token(" a") + token(" b")).replace(b"\n", b"\r\n") + b": ping\r\n\r\n"
    assert parse(streamed((11.0, body)), due_s=10.0, stream=True).num_out == 2


def test_an_event_that_the_end_of_the_stream_completes_came_with_the_last_read():
    last = token(" b", "length").rstrip()
    answer = streamed((11.0, token(" a")), (12.0, last[:9]), (13.5, last[9:]))
    assert parse(answer, due_s=10.0, stream=True).event_s == [11.0, 13.5]


def test_a_whole_answer_is_one_event_at_its_end():
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    body = json.dumps({"choices": [{"text": "a b c", "finish_reason": "length"}], "usage": usage}).encode()
    sample = parse(streamed((11.0, body[:20]), (12.5, body[20:])), due_s=10.0, stream=False)
    assert (sample.ttft_s, sample.latency_s, sample.num_out, sample.gaps_s) == (2.5, 2.5, 3, [])


def test_tokens_without_text_that_all_come_with_the_end_are_an_answer():
    """As random weights sample them, and as a client gets them that was late to read."""
    usage = {"prompt_tokens": 2, "completion_tokens": 2}
    ended = event(choices=[{"text": "", "finish_reason": "length"}]) + event(choices=[], usage=usage)
    sample = parse(streamed((11.0, ended)), due_s=10.0, stream=True)
    assert (sample.ttft_s, sample.num_out) == (1.0, 2)
    with pytest.raises(AnswerError, match="no tokens"):
        parse(streamed((11.0, ended.replace(b'_tokens": 2', b'_tokens": 0'))), due_s=10.0, stream=True)


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (400, b'{"error": "no"}', "status 400: "),
        (200, event(error={"message": "step failed"}), "step failed"),
        (200, b"data: {nonsense\n\n", "not an event"),
        (200, b"data: [DONE]\n\n", "no tokens"),
    ],
)
def test_what_is_no_answer_raises(status, body, complaint):
    with pytest.raises(AnswerError, match=complaint):
        parse(Answer(10.0, status, [(11.0, body)]), due_s=10.0, stream=True)

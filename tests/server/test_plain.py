"""What is plain: never more than the parser and the guard let pass, and then what they read in it."""

import time

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aserve.http.middleware import check_head
from aserve.server.plain import MAX_HEAD_BYTES, plain_request
from aserve.server.strict import StrictConnection

HEADERS = [
    *(b"Host: x", b"host:y:80", b"Host: a/b", b"Content-Length: 5", b"content-length:\t5 ", b"Content-Length: 5, 5"),
    *(b"Content-Length: +5", b"Content-Length:", b"Content-Length : 5", b"Transfer-Encoding: chunked", b"TE: trailers"),
    *(b"Connection: keep-alive", b"Connection: close", b"Connection: keep-alive, upgrade", b"Upgrade: h2c"),
    *(b"Expect: 100-continue", b"Authorization: Bearer key", b"X-Request-Id: a", b"x-request-id:", b"Accept: */*"),
    *(
        b" folded",
        b"\tfolded: x",
        b"X: a\x00b",
        b"X: a\rb",
        b"X: \xc3\xa4",
        b"X: a\x7f",
        b": x",
        b"X\xff: y",
        b"X",
        b"",
    ),
]
FIRST = [
    *(b"POST /v1/completions HTTP/1.1", b"POST /v1/completions?a=b HTTP/1.1", b"POST / HTTP/1.1"),
    *(b"POST http://x/v1/completions HTTP/1.1", b"POST /a b HTTP/1.1", b"post / HTTP/1.1", b"GET / HTTP/1.1"),
    *(b"POST / HTTP/1.0", b"POST / HTTP/1.1 ", b"POST  / HTTP/1.1", b"POST /\xff HTTP/1.1", b" POST / HTTP/1.1"),
]
PLAIN = [b"Host: x", b"Content-Length: 5"]


def read(data: bytes) -> tuple[h11.Request, bytes] | None:
    """The request as the parser reads it, if it is one, and what follows its head."""
    parser = StrictConnection(h11.SERVER)
    parser.receive_data(data)
    try:
        event = parser.next_event()
    except h11.RemoteProtocolError:
        return None
    return (event, parser.trailing_data[0]) if isinstance(event, h11.Request) else None


@settings(max_examples=2000, deadline=None)
@given(
    st.sampled_from(FIRST),
    st.permutations(PLAIN).flatmap(
        lambda plain: st.lists(st.sampled_from(HEADERS), max_size=4).map(lambda others: [*plain, *others])
    )
    | st.lists(st.sampled_from(HEADERS), max_size=6),
    st.sampled_from([b"\r\n", b"\n", b"\r\r\n"]),
)
@example(FIRST[0], PLAIN, b"\r\n")
@example(FIRST[0], [*PLAIN, *PLAIN], b"\r\n")
def test_what_is_plain_is_what_the_parser_reads_and_the_guard_lets_pass(first, headers, line_end):
    """Catches a head of which the door has another opinion than whoever would have answered it: smuggling, a 401."""
    data = line_end.join([first, *headers, b"", b""]) + b"hello"
    plain = plain_request(data)
    if plain is None:
        return
    found = read(data)
    assert found is not None
    parsed, rest = found
    assert (parsed.method, parsed.target, parsed.http_version) == (b"POST", plain.scope["raw_path"], b"1.1")
    assert plain.scope["path"].encode() == plain.scope["raw_path"]
    assert dict(parsed.headers)[b"content-length"] == b"%d" % plain.num_body_bytes
    assert data[plain.num_head_bytes :] == rest
    who = [(name, value) for name, value in parsed.headers if name in (b"authorization", b"x-request-id")]
    assert plain.scope["headers"] == who
    scope = {"headers": list(parsed.headers), "raw_path": parsed.target, "query_string": b"", "http_version": "1.1"}
    assert check_head({**scope, "method": "POST"}) is None


@pytest.mark.parametrize("line_end", [b"\r\n", b"\n"])
def test_the_usual_clients_are_plain(line_end):
    """Catches a door that is so strict that all go the long way."""
    headers = [b"Host: 127.0.0.1:8000", b"Accept: */*", b"Connection: keep-alive", b"Content-Length: 2"]
    agent = b'User-Agent: OpenAI/Python 1.2 (a; "b")'
    data = line_end.join([FIRST[0], *headers, agent, b"authorization: Bearer key", b"", b""])
    assert (plain_request(data) is not None) == (line_end == b"\r\n")
    for size in range(len(data)):
        assert plain_request(data[:size]) is None, "not before the head has come"


@pytest.mark.parametrize(
    "filling", [b"X: " + b" " * 100_000, b"X:" + b"\t " * 50_000, b"X" * 100_000, b"a:\r\n" * 30_000]
)
def test_a_long_head_takes_no_time(filling):
    """Catches a pattern that looks at long heads again and again."""
    data = FIRST[0] + b"\r\n" + filling
    start_s = time.process_time()
    for _ in range(10):
        assert plain_request(data) is None
        assert plain_request(data[: MAX_HEAD_BYTES - 1]) is None
        assert plain_request(data[: MAX_HEAD_BYTES - 1] + b"\x00\r\n\r\n") is None
    assert time.process_time() - start_s < 0.1

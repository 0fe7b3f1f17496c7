"""The load generator's HTTP: bodies come out whole however the bytes come, and dropped connections are opened anew."""

import pytest
from completions_server import CompletionsServer, served

from aserve.load.http import AnswerError, AnswerParser, Client

BODY = b"data: one\n\ndata: two 0\r\n\r\ndata: [DONE]\n\n"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"b\r\ndata: one\n\n\r\n"
    b"1d;note=x\r\ndata: two 0\r\n\r\ndata: [DONE]\n\n\r\n"
    b"0\r\n\r\n"
)
COUNTED = b"HTTP/1.1 201 Created\r\ncontent-length: %d\r\nConnection: close\r\n\r\n" % len(BODY) + BODY


def parse(pieces):
    parser = AnswerParser()
    body = b"".join(parser.feed(piece) for piece in pieces)
    return parser, body


@pytest.mark.parametrize("cut", range(len(CHUNKED)))
def test_chunks_cut_anywhere_are_the_same_body(cut):
    parser, body = parse([CHUNKED[:cut], CHUNKED[cut:]])
    assert (parser.status, body, parser.ended, parser.keeps_alive) == (200, BODY, True, True)


def test_one_byte_at_a_time():
    parser, body = parse([bytes([byte]) for byte in CHUNKED])
    assert (body, parser.ended) == (BODY, True)


def test_a_counted_body_ends_with_its_last_byte():
    parser, body = parse([COUNTED[:-1]])
    assert not parser.ended
    assert body + parser.feed(COUNTED[-1:]) == BODY
    assert (parser.status, parser.ended, parser.keeps_alive) == (201, True, False)


def test_an_uncounted_body_ends_with_the_connection():
    parser, body = parse([b"HTTP/1.1 200 OK\r\n\r\nsome", b" more"])
    assert (body, parser.ended) == (b"some more", False)
    parser.end()
    assert (parser.ended, parser.keeps_alive) == (True, False)


@pytest.mark.parametrize("cut", [5, 60, len(CHUNKED) - 1])
def test_a_connection_that_ends_within_an_answer_is_an_error(cut):
    parser, _ = parse([CHUNKED[:cut]])
    with pytest.raises(AnswerError):
        parser.end()


async def post(client, num_tokens=2):
    body = b'{"prompt": [1, 2], "max_tokens": %d, "stream": true}' % num_tokens
    return await client.post(client.render("/v1/completions", body))


async def test_a_connection_is_used_again():
    server = CompletionsServer()
    async with served(server.handle) as url:
        client = Client(url)
        for _ in range(3):
            assert (await post(client)).body.endswith(b"data: [DONE]\n\n")
        client.close()
    assert (server.num_connections, client.num_retries) == (1, 0)


async def test_every_request_is_answered_by_a_server_that_drops_connections():
    server = CompletionsServer(drop=True)
    async with served(server.handle) as url:
        client = Client(url)
        for _ in range(5):
            answer = await post(client)
            assert (answer.status, answer.reads[0][0] >= answer.sent_s) == (200, True)
        client.close()
    assert len(server.seen) == 5


async def test_without_keep_alive_each_request_has_its_connection():
    server = CompletionsServer()
    async with served(server.handle) as url:
        client = Client(url, keep_alive=False)
        await post(client)
        await post(client)
    assert server.num_connections == 2


async def test_a_drop_that_shows_only_when_sending_costs_a_retry():
    async def answer_once_and_read_twice(reader, writer):
        await reader.readuntil(b"}")
        writer.write(COUNTED.replace(b"Connection: close\r\n", b""))
        await reader.readuntil(b"}")

    async with served(answer_once_and_read_twice) as url:
        client = Client(url)
        assert (await post(client)).body == BODY
        assert (await post(client)).body == BODY
        client.close()
    assert client.num_retries == 1


async def test_a_server_that_does_not_answer_is_given_up():
    async def silence(reader, writer):
        await reader.read()

    async with served(silence) as url:
        with pytest.raises(TimeoutError):
            await post(Client(url, timeout_s=0.05))

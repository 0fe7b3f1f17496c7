"""A small real server of /v1/completions that makes up its tokens: what the benchmarks measure when they are tested.

python completions_server.py PORT [seconds between tokens] [drop]      drop: close every connection after its answer
"""

import asyncio
import json
import sys
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def served(handle):
    """A server that hands connections to `handle`, as its URL; leaving it ends the connections."""
    tasks = set()

    async def one(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has left
                await handle(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports are let go in the loop's next turn


class CompletionsServer:
    """Streams as many tokens as are asked for. `seen` holds the bodies of the requests, `num_connections` counts.

    gap_s: time before each token. drop: close a connection after its answer, although it said that it would be kept.
    """

    def __init__(self, gap_s=0.0, drop=False):
        self.gap_s, self.drop = gap_s, drop
        self.seen, self.num_connections = [], 0

    async def handle(self, reader, writer):
        """One connection."""
        self.num_connections += 1
        await self._answer(reader, writer)
        while not self.drop:
            await self._answer(reader, writer)

    async def _answer(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = json.loads(await reader.readexactly(int(lengths[0]))) if lengths else {}
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            return
        self.seen.append(body)
        if body.get("max_tokens") == 13:
            writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 7\r\n\r\nunlucky")
            return
        num_in = len(body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split())
        usage = {"prompt_tokens": num_in, "completion_tokens": body["max_tokens"]}
        if body.get("stream"):
            await self._stream(writer, body["max_tokens"], usage if "stream_options" in body else None)
        else:
            choice = {"text": " a" * body["max_tokens"], "finish_reason": "length"}
            whole = json.dumps({"choices": [choice], "usage": usage}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(whole) + whole)

    async def _stream(self, writer, num_tokens, usage):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for i in range(num_tokens):
            await asyncio.sleep(self.gap_s)
            self._event(writer, {"choices": [{"text": f" {i}", "finish_reason": None}]})
        self._event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        if usage is not None:
            self._event(writer, {"choices": [], "usage": usage})
        self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    @staticmethod
    def _event(writer, data):
        event = b"data: %b\n\n" % (data if isinstance(data, str) else json.dumps(data)).encode()
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))


async def serve_for_ever(port, gap_s, drop):
    async def one(reader, writer):
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await server.handle(reader, writer)
        writer.close()

    server = CompletionsServer(gap_s, drop)
    await (await asyncio.start_server(one, "127.0.0.1", port)).serve_forever()


if __name__ == "__main__":
    asyncio.run(serve_for_ever(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0, "drop" in sys.argv))

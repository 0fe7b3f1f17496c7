"""Connections that are encrypted: answers, ends and refusals as on others, and whoever speaks no TLS hurts nobody."""

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from aserve.core.errors import ConfigError
from aserve.server import Limits
from aserve.server.connection import Connection
from aserve.server.connections import Connections
from aserve.server.listener import Listener
from aserve.server.sockets import tls_context
from tests.engines import scripted_engine
from tests.server.test_lifecycle import Run, chat, running
from tests.server.wire import Client, request, until

EC = ("-pkeyopt", "ec_paramgen_curve:prime256v1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A certificate for localhost and its key, that key under a password, and another key."""
    if shutil.which("openssl") is None:
        pytest.skip("makes certificates by openssl, which is not here")
    folder = tmp_path_factory.mktemp("tls")
    named = SimpleNamespace(
        **{name: str(folder / f"{name}.pem") for name in ("cert", "key", "locked", "other", "both")}
    )

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True)

    to = ("-keyout", named.key, "-out", named.cert, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    openssl("req", "-x509", "-newkey", "ec", *EC, "-nodes", "-days", "2", *to)
    openssl("ec", "-in", named.key, "-aes128", "-passout", "pass:secret", "-out", named.locked)
    openssl("genpkey", "-algorithm", "EC", *EC, "-out", named.other)
    Path(named.both).write_text(Path(named.cert).read_text() + Path(named.key).read_text())
    return named


async def connected(run: Run, files: SimpleNamespace) -> Client:
    context = ssl.create_default_context(cafile=files.cert)
    port = int(run.lines[0].rpartition(":")[2])
    streams = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    run.clients.append(Client(*streams))
    return run.clients[-1]


@pytest.mark.parametrize("names", [("cert", "key"), ("both", None)])
async def test_requests_are_answered_one_after_the_other_and_streamed(files, names):
    paths = [None if name is None else getattr(files, name) for name in names]
    async with running(scripted_engine(), tls=tls_context(*paths)) as run:
        assert run.lines[0].startswith("aserve: listening on https://127.0.0.1:")
        client = await connected(run, files)
        for _ in range(2):
            assert (await client.ask(request(b"/ready"))).status == 200
        await client.send(chat(stream=True))
        assert (await client.head()).status == 200
        assert (await client.chunks()).endswith(b"data: [DONE]\n\n")
        assert (await client.ask(chat(stream=False))).status == 200


async def test_what_is_no_http_is_refused_and_the_connection_ends(files):
    async with running(scripted_engine(), tls=tls_context(files.cert, files.key)) as run:
        client = await connected(run, files)
        await client.send(b"nonsense\r\n\r\n")
        assert (await client.head()).status == 400
        async with asyncio.timeout(10):
            await client.reader.read()
        assert (await (await connected(run, files)).ask(request(b"/ready"))).status == 200


async def test_a_client_that_leaves_in_its_answer_is_noticed(files):
    engine = scripted_engine()
    async with running(engine, tls=tls_context(files.cert, files.key)) as run:
        client = await connected(run, files)
        await client.send(chat(stream=True))
        assert (await client.head()).status == 200
        client.writer.transport.abort()
        await until(lambda: not engine.statistics().num_running)


async def test_who_speaks_no_tls_or_says_nothing_is_cut_off_and_others_go_on(files):
    limits = Limits(head_timeout_s=0.3)
    async with running(scripted_engine(), tls=tls_context(files.cert, files.key), limits=limits) as run:
        for words in (request(b"/ready"), b""):
            plain = await run.connect()
            await plain.send(words)
            async with asyncio.timeout(10):
                answer = await plain.reader.read()
            assert not answer.startswith(b"HTTP/")
        assert (await (await connected(run, files)).ask(request(b"/ready"))).status == 200


class Guest(asyncio.Protocol):
    """Says hello, and is told when its client has gone."""

    def __init__(self):
        self.gone = asyncio.Event()

    def connection_made(self, transport):
        transport.write(b"hello")

    def connection_lost(self, exc):
        self.gone.set()


async def test_whoever_fails_at_its_handshake_while_the_listener_closes_others_are_answered(files):
    guests = []

    def welcome():
        guests.append(Guest())
        return guests[-1]

    context = tls_context(files.cert, files.key)
    listener = await Listener.open("127.0.0.1", 0, None, welcome, context, handshake_timeout_s=0.3)
    address = ("127.0.0.1", int(listener.url.rpartition(":")[2]))
    left, plain, silent, good = (socket.create_connection(address, timeout=10) for _ in range(4))
    left.close()
    plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
    good.setblocking(False)
    trusting = {"ssl": ssl.create_default_context(cafile=files.cert), "server_hostname": "localhost"}
    greeting = asyncio.create_task(asyncio.open_connection(sock=good, **trusting, ssl_handshake_timeout=1.0))
    shutting = asyncio.create_task(listener.shut())
    try:
        reader, writer = await greeting
        assert await reader.readexactly(5) == b"hello"
        writer.close()
        await shutting
        async with asyncio.timeout(10):
            await asyncio.gather(writer.wait_closed(), *(guest.gone.wait() for guest in guests[-1:]))
    finally:
        await asyncio.gather(shutting, return_exceptions=True)
        listener.close()
        plain.close()
        silent.close()


async def test_who_was_connected_when_the_listener_closed_is_answered(files):
    async with running(scripted_engine(), tls=tls_context(files.cert, files.key)) as run:
        client = await connected(run, files)
        await client.send(chat(stream=True))
        assert (await client.head()).status == 200
        run.server.stop()
        assert (await client.chunks()).endswith(b"data: [DONE]\n\n")
        assert await run.exit_code() == 0


def test_files_that_do_not_do_are_named(files, tmp_path):
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nothing")
    for cert, key, reason in (
        (None, files.key, "--ssl-certfile, which it belongs to, is not"),
        ("nowhere.pem", None, "--ssl-certfile: nowhere.pem is no file"),
        (files.cert, "nowhere.pem", "--ssl-keyfile: nowhere.pem is no file"),
        (files.cert, files.other, "KEY_VALUES_MISMATCH"),
        (files.cert, files.locked, "the key is encrypted"),
        (files.cert, None, f"--ssl-keyfile {files.cert}"),
        (str(nonsense), files.key, f"--ssl-certfile {nonsense}"),
    ):
        with pytest.raises(ConfigError, match=reason.replace(".", r"\.")) as caught:
            tls_context(cert, key)
        assert "\n" not in caught.value.message
    assert tls_context(None, None) is None


async def test_who_takes_an_answer_slowly_gets_all_of_it(files):
    """What is encrypted is not counted as unsent by the event loop: the end of an answer leaves time for it too."""
    body = bytes(range(256)) * 4096

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async with asyncio.TaskGroup() as tasks:
        connections = Connections(app, Limits(send_timeout_s=1.0, linger_s=0.05), tasks)
        context = tls_context(files.cert, files.key)
        listener = await Listener.open("127.0.0.1", 0, None, lambda: Connection(connections), context)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", int(listener.url.rpartition(":")[2])))
            sock.setblocking(False)
            trusting = ssl.create_default_context(cafile=files.cert)
            client = Client(*await asyncio.open_connection(sock=sock, ssl=trusting, server_hostname="localhost"))
            await client.send(request(b"/", b"GET", b"Connection: close"))
            await client.head()
            got = b""
            while piece := await client.reader.read(2**15):
                got += piece
                await asyncio.sleep(0.03)
            assert got == body
            await client.close()
        listener.close()
        connections.abort()

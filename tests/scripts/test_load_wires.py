"""The cheapest client, against a server of one thread that says what it is told to."""

import socket
import threading

import pytest
from load.wires import Wires

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
REFUSED = b"HTTP/1.1 429 \r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"
LAST = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nConnection: close\r\n\r\n"


class Scripted:
    """Answers the n-th request, on whatever connection, by the n-th list of pieces; None ends the connection."""

    def __init__(self, answers: list[list[bytes] | None]) -> None:
        self.answers = iter(answers)
        self.num_connections = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1000):
                pieces = next(self.answers)
                if pieces is None:
                    return
                for piece in pieces:
                    connection.sendall(piece)
                    threading.Event().wait(0.01)


@pytest.fixture
def ask():
    """Asks a scripted server so many times, one after another; the statuses, and how many connections it took."""
    made: list[tuple[Scripted, Wires]] = []

    def asked(answers: list[list[bytes] | None]) -> tuple[list[int], int]:
        server = Scripted(answers)
        wires = Wires(server.port)
        made.append((server, wires))
        told: list[tuple[int, float]] = []
        for number in range(len(answers)):
            wires.send(b"x", lambda status, _answer, took_s: told.append((status, took_s)))
            while len(told) == number:
                wires.wait(5.0)
        assert wires.num_busy == 0
        assert all(0 < took_s < 60 for _, took_s in told)
        return [status for status, _ in told], server.num_connections

    yield asked
    for server, wires in made:
        wires.close()
        server.listener.close()


def test_an_answer_is_told_when_all_of_it_has_come(ask):
    """Catches an answer that is cut where a read ends, and one whose rest is taken for the next."""
    pieces = [WHOLE[:5], WHOLE[5:30], WHOLE[30:-1], WHOLE[-1:]]
    assert ask([pieces, [REFUSED], [WHOLE]]) == ([200, 429, 200], 1)


def test_the_servers_last_answer_ends_the_connection(ask):
    assert ask([[LAST], [WHOLE]]) == ([200, 200], 2)


def test_a_connection_that_ends_without_an_answer_is_told(ask):
    """Catches a lost request that is not counted."""
    assert ask([None, [WHOLE]]) == ([0, 200], 2)


def test_requests_at_once_have_connections_of_their_own():
    server = Scripted([[WHOLE], [REFUSED]])
    wires = Wires(server.port)
    statuses: list[int] = []
    for _ in range(2):
        wires.send(b"x", lambda status, _answer, _took_s: statuses.append(status))
    assert wires.num_busy == 2
    while len(statuses) < 2:
        wires.wait(5.0)
    assert sorted(statuses) == [200, 429]
    assert server.num_connections == 2
    wires.close()
    server.listener.close()

"""The end of a whole server, at any moment: by SIGTERM nothing is lost, and after SIGKILL it starts again."""

import json
import os
import random
import signal
import socket
import statistics
import threading
import time

import httpx
import pytest

from tests.e2e.server_process import ServerProcess, deltas, question, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_KILLS = int(os.environ.get("NUM_KILLS", "20"))
NUM_DRAINS = int(os.environ.get("NUM_DRAINS", "10"))
READY_S = 5.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_in_the_delay_it_is_unready_and_serves_all_the_same():
    with serving("--drain-delay", "3") as server:
        server.wait_until_ready()
        with server.stream(question("Hello!", ignore_eos=True, max_tokens=200)) as response:
            lines = response.iter_lines()
            first = next(lines)
            server.popen.send_signal(signal.SIGTERM)
            server.line_with("unready; requests are taken for 3 s more")
            refused = server.http.get("/ready")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            for path in ("/health", "/metrics", "/v1/models"):
                assert server.http.get(path).status_code == 200
            body = question("Hello!", max_tokens=2)
            assert httpx.post(server.url + "/v1/chat/completions", json=body, timeout=30).status_code == 200
            *_, last = deltas([first, *lines])
        assert last["finish_reason"] == "length"
        assert server.popen.wait(25) == 0


def ask(server: ServerProcess, rng: random.Random, outcomes: list[str]) -> None:
    """Stream until the server is gone, and note how each stream ended."""
    while True:
        body = question("Hello!", ignore_eos=True, max_tokens=rng.randint(1, 60), stream=True)
        try:
            with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=30) as response:
                if response.status_code == 503:
                    outcomes.append("refused")
                    return
                *_, last = deltas(response.iter_lines())
                outcomes.append(last["finish_reason"])
        except (httpx.ConnectError, httpx.ReadError, httpx.WriteError) as error:
            outcomes.append("gone" if isinstance(error, httpx.ConnectError) else "cut")
            return


@pytest.mark.thorough
def test_drains_at_random_moments():
    outcomes: list[str] = []
    for seed in range(NUM_DRAINS):
        rng = random.Random(seed)
        with serving() as server:
            server.wait_until_ready()
            clients = [threading.Thread(target=ask, args=(server, random.Random(i), outcomes)) for i in range(6)]
            for client in clients:
                client.start()
            time.sleep(rng.random())
            server.popen.send_signal(signal.SIGTERM)
            assert server.popen.wait(35) == 0
            for client in clients:
                client.join()
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))})
    assert "cut" not in outcomes
    assert outcomes.count("length") > NUM_DRAINS


@pytest.mark.thorough
def test_killed_at_random_moments_it_is_soon_ready_again():
    """On one port, with nothing to be cleaned in between; half of the kills hit a server at work."""
    port, took_s = free_port(), []
    for seed in range(NUM_KILLS):
        rng = random.Random(seed)
        with serving(port=port) as server:
            server.wait_until_ready()
            assert server.http.get("/ready").json() == {"status": "ready"}
            took_s.append(time.monotonic() - server.launched_s)
            if seed % 2:
                with server.stream(question("Hello!", ignore_eos=True)) as response:
                    for _, line in zip(range(rng.randint(1, 40)), response.iter_lines(), strict=False):
                        assert not line or json.loads(line.removeprefix("data: "))
                    server.popen.kill()
            else:
                server.popen.kill()
            assert server.popen.wait(25) == -signal.SIGKILL
    print(f"{NUM_KILLS} kills: ready after {statistics.median(took_s):.2f} s, at most {max(took_s):.2f} s")
    assert max(took_s) <= READY_S

"""The benchmark of looking on, on aserve with the demo model: streams of each kind are asked for, and all are whole."""

import asyncio
import json

import bench_looking
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.torch]


@pytest.mark.thorough
def test_what_is_watched_and_what_is_explained_are_put_beside_plain_streams(capsys):
    bench_looking.main(["--streams", "2", "--rounds", "3", "--max-tokens", "8"])
    line = json.loads(capsys.readouterr().out)
    assert (line["bench"], line["streams"]) == ("looking", 2)
    rates = [line[f"{kind}_tokens_per_s"] for kind in bench_looking.KINDS]
    assert min(*rates, line["watched_ratio"], line["explained_ratio"]) > 0


async def test_a_viewer_who_is_refused_is_told():
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        with pytest.raises(ValueError, match="403"):
            async with bench_looking.viewer(server.sockets[0].getsockname()[1]):
                pass

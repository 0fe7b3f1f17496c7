"""The benchmark of parsed answers on aserve with the demo model: both kinds are asked for, and all are whole."""

import json

import bench_tools
import pytest

from aserve.load.http import Answer

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.torch]


@pytest.mark.thorough
def test_answers_that_are_parsed_are_put_beside_plain_ones(capsys):
    bench_tools.main(["--streams", "2", "--rounds", "2", "--max-tokens", "8"])
    line = json.loads(capsys.readouterr().out)
    assert (line["bench"], line["streams"], line["parser"]) == ("tools", 2, "hermes")
    assert min(line["tokens_per_s"], line["plain_tokens_per_s"], line["ratio"]) > 0


def test_an_answer_that_is_none_is_told():
    with pytest.raises(ValueError, match="status 400: b'no such model'"):
        bench_tools.num_tokens(Answer(0.0, 400, [(1.0, b"no such model")]))

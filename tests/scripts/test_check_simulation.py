"""What a simulation says against what runs do, in a few requests."""

import re

import check_simulation
import pytest

from aserve.simulation.meter import Figures

pytestmark = pytest.mark.torch


@pytest.mark.thorough
def test_a_table_of_what_was_simulated_against_what_ran_for_each_share(capsys):
    words = ["--model", "demo", "--rate", "20", "--seconds", "0.5", "--shares", "0.5,1", "--rounds", "1"]
    check_simulation.main([*words, "--base", "max_num_batched_tokens=512", "--changes", "max_num_seqs=2"])
    lines = capsys.readouterr().out.splitlines()
    [head, again] = [line for line in lines if line.startswith("| | ")]
    assert (
        head == again == "| | as recorded | max_num_seqs=2 | (max_num_seqs=2: what it changed) | (the same run twice) |"
    )
    rows = [line for line in lines if re.match(r"\| [a-z]", line)]
    assert len(rows) == 2 * len(check_simulation.FIGURES)
    assert all(re.fullmatch(r"\| [a-z ,0-9]+ \|( [+-]\d+\.\d( ± \d+\.\d)? \|){4}", row) for row in rows), rows


def test_what_is_no_option_of_an_engine_cannot_be_run(capsys):
    with pytest.raises(SystemExit):
        check_simulation.main(["--changes", "num_blocks=10"])
    assert "num_blocks is none of an engine's options" in capsys.readouterr().err


def test_traffic_is_the_same_for_the_same_seed_and_comes_at_its_rate():
    one, other = (check_simulation.asks(400, 10.0, 500, seed=3) for _ in range(2))
    assert one == other
    assert one[-1].due_s == pytest.approx(40.0, rel=0.2)
    assert all(4 <= ask.num_tokens <= 160 and len(ask.prompt) <= 464 for ask in one)


def test_figures_are_off_in_percent():
    names = Figures.__struct_fields__
    real, found = Figures(**dict.fromkeys(names, 2.0)), Figures(**dict.fromkeys(names, 3.0))
    assert set(check_simulation.off([(found, real)]).values()) == {(50.0, 0.0)}
    assert check_simulation.off([(found, real), (real, real)])["ttft_p99_s"] == pytest.approx((25.0, 25.0))
    assert check_simulation.in_words(check_simulation.Off(25.0, 2.5)) == "+25.0 ± 2.5"

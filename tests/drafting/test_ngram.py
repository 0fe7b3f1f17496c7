"""Prompt lookup: what is found, where, and that it costs little whatever the length."""

import random
import time

import pytest

from aserve.core.ids import SeqId
from aserve.drafting import ngram
from aserve.drafting.ngram import NgramProposer

NAME = SeqId(0)


def guess(tokens: list[int], most: int = 3, *, shortest: int = 2, longest: int = 4) -> tuple[int, ...]:
    return NgramProposer(most=most, shortest=shortest, longest=longest).propose(NAME, tokens, most)


def oracle(tokens: list[int], most: int, shortest: int, longest: int) -> tuple[int, ...]:
    """By looking everywhere: of the places where most of the newest tokens agree the latest."""
    best, best_length = 0, 0
    for end in range(shortest, len(tokens)):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= max(shortest, best_length):
            best, best_length = end, length
    period = len(tokens) - best
    return tuple(tokens[best + place % period] for place in range(most)) if best else ()


def test_what_followed_the_newest_tokens_the_last_time_is_guessed():
    assert guess([1, 2, 3, 4, 5, 9, 1, 2]) == (3, 4, 5)
    assert guess([1, 2, 3, 1, 2, 4, 1, 2]) == (4, 1, 2)  # the latest of equals
    assert guess([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]) == (3, 8, 1)  # more tokens agree there
    assert guess([1, 2, 3, 4]) == ()
    assert guess([2, 1]) == ()
    assert guess([5]) == ()


def test_what_repeats_itself_is_guessed_to_go_on():
    assert guess([1, 2, 1, 2, 1], most=5) == (2, 1, 2, 1, 2)
    assert guess([4, 4, 4], most=4) == (4, 4, 4, 4)


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_guesses_are_those_of_looking_everywhere(shortest, longest, monkeypatch):
    monkeypatch.setattr(ngram, "MOST_COMPARED", 1000)
    rng = random.Random(shortest * 10 + longest)
    num_guessed = 0
    for _ in range(60):
        proposer = NgramProposer(most=4, shortest=shortest, longest=longest)
        tokens = rng.choices(range(4), k=rng.randint(1, 12))
        for _ in range(25):
            found = proposer.propose(NAME, tokens, 4)
            assert found == oracle(tokens, 4, shortest, longest), tokens
            num_guessed += bool(found)
            tokens += rng.choices(range(4), k=rng.randint(0, 3))  # none or several land at once
    assert num_guessed > 300


def test_sequences_do_not_see_each_other_and_leave_nothing():
    proposer = NgramProposer(most=2, shortest=1, longest=1)
    assert proposer.propose(SeqId(1), [5, 6, 5], 2) == (6, 5)
    assert proposer.propose(SeqId(2), [5], 2) == ()
    proposer.forget(SeqId(1))
    proposer.forget(SeqId(1))
    proposer.forget(SeqId(2))
    assert proposer._packed == {}


def test_so_many_newest_tokens_are_searched(monkeypatch):
    monkeypatch.setattr(ngram, "MOST_SEARCHED", 10)
    assert guess([1, 2, 3, 4, *range(10, 14), 1, 2], most=2) == (3, 4)
    assert guess([1, 2, 3, 4, *range(10, 15), 1, 2], most=2) == ()


def test_bytes_of_one_token_and_the_next_are_no_token():
    shifted = [1 << 8] * 40  # as bytes one after another those of 1, one byte later
    assert guess([1, 1, 7, *shifted[:2], 1, 1], most=1) == (7,)
    assert guess([*shifted, 1, 1], most=1) == ()
    assert guess([1, 1, *shifted, 1, 1], most=1) == (), "as many places as are compared are between tokens"
    assert guess([(1 << 17) - 1, (1 << 21) - 1, 5, (1 << 17) - 1, (1 << 21) - 1], most=1) == (5,)


@pytest.mark.timing
@pytest.mark.parametrize("pattern", ["new", "one token", "all but the first", "between tokens", "bytes alike"])
def test_a_search_takes_a_millisecond_at_most(pattern):
    """Of a sequence longer than is searched, made up to be searched slowly."""
    rng, num = random.Random(0), 100_000
    tokens = {
        "new": lambda: rng.choices(range(150_000), k=num),
        "one token": lambda: [5] * num + [6, 7, 8],
        "all but the first": lambda: [7, 5, 5] * (num // 3) + [6, 5, 5],
        "between tokens": lambda: [1 << 8] * num + [1, 1, 1],
        "bytes alike": lambda: [0x10101] * num + [0x10101, 0x10101, 0x1010101],
    }[pattern]()
    proposer = NgramProposer(most=8, shortest=3, longest=5)
    proposer.propose(NAME, tokens, 8)
    took = []
    for _ in range(20):
        start_s = time.perf_counter()
        proposer.propose(NAME, tokens, 8)
        took.append(time.perf_counter() - start_s)
    assert min(took) < 1e-3

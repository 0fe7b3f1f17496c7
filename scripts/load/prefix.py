"""Requests that share their beginning, and what that did to their times to the first token."""

from aserve.load.arrivals import Arrival
from aserve.load.drive import Round
from aserve.load.figures import Figures, percentile


def sharing(prefix_len: int, unique_len: int, num_out: int) -> Arrival:
    """A request whose first `prefix_len` tokens it shares with all others of the same round."""
    return Arrival(0.0, prefix_len + unique_len, num_out, prefix_ids=(0,), block_tokens=prefix_len)


def prefix_figures(done: Round) -> Figures:
    """First and later times to the first token, in ms, of requests sent one after another.

    Raises AnswerError where one of them failed.
    """
    done.check()
    first_ms, *later_ms = [1e3 * sample.ttft_s for sample in done.samples]
    later_ms_p50 = percentile(later_ms, 50)
    return {
        "ttft_first_ms": first_ms,
        "ttft_later_p50_ms": later_ms_p50,
        "ttft_later_p99_ms": percentile(later_ms, 99),
        "later_over_first": later_ms_p50 / first_ms,
    }

"""A thread that ends, for work on large tensors elsewhere than where steps are computed.

The first such work of a thread makes threads of OpenMP, which stay as long as it does. OpenMP lets those that wait for
the next matrix product spin only as long as all of them fit the processors; else they sleep, and to wake one takes
longer than many a product: beside idle ones a token of a small model takes 27 ms in place of 20.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_thread_that_ends(work: Callable[[], T]) -> T:
    """What `work` returns or raises. Blocking."""
    with ThreadPoolExecutor(1, thread_name_prefix="aserve-passing") as thread:
        return thread.submit(work).result()

"""The unit of knowledge: a topic with one answer and one follow-up."""

from typing import NamedTuple


class Topic(NamedTuple):
    """One thing that the model can explain.

    names fit into "What is {name}?"; a topic without names has questions only.
    has_why: more says why the thing is useful, and not just something else about it.
    """

    names: tuple[str, ...]
    answer: str
    more: str
    questions: tuple[str, ...] = ()
    has_why: bool = False

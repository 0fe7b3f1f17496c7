"""Texts as terms of a grammar."""

from aserve.constraints.lark import terms


def test_special_tokens_stand_where_they_are_in_the_text_and_the_longest_of_those_that_begin_there():
    special = {"<call>": 7, "</call>": 8, "<call>>": 9}
    assert terms('a "b"<call>c</call><call>>', special).split() == ['"a', '\\"b\\""', "<[7]>", '"c"', "<[8]>", "<[9]>"]
    assert terms("plain", special) == '"plain"'

"""What the log is told of an exception."""

from aserve.core.faults import MAX_DESCRIBED, describe


def caught(raising):
    try:
        raising()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_what_is_behind_an_exception_is_told_and_no_text():
    def raise_two():
        try:
            raise ValueError("a secret")
        except ValueError as error:
            raise RuntimeError("another") from error

    text = describe(caught(raise_two))
    assert text.startswith("builtins.RuntimeError\n")
    assert "behind it: builtins.ValueError" in text
    assert "secret" not in text
    assert "another" not in text


def test_a_member_that_has_its_group_behind_it_is_told_once():
    def raise_a_member_of_a_group():
        try:
            raise ExceptionGroup("", [ValueError(), KeyError()])
        except ExceptionGroup as group:
            raise group.exceptions[0]  # noqa: B904  as task groups are opened

    text = describe(caught(raise_a_member_of_a_group))
    assert [text.count(name) for name in ("ValueError", "ExceptionGroup", "KeyError")] == [1, 1, 1]


def test_a_group_of_many_is_not_told_at_length():
    assert describe(ExceptionGroup("", [ValueError() for _ in range(1000)])).count("behind it") == MAX_DESCRIBED - 1

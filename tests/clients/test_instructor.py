"""instructor in its modes for OpenAI's API: a type is asked for, and comes, whole and part by part."""

import pytest

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def found(run_client):
    return run_client("instructor_sdk")


def is_person(answer):
    return (sorted(answer), type(answer["name"]), type(answer["age"])) == (["age", "name"], str, int)


@pytest.mark.parametrize("mode", ["tools", "tools_strict", "json_schema", "json", "md_json"])
def test_an_answer_of_a_type(found, mode):
    """Parts are asked for by another schema, hence they may come to another answer."""
    whole, last_part, is_in_parts = found[mode]
    assert is_person(whole)
    assert is_person(last_part)
    assert is_in_parts


OTHERS = ["responses_tools", "responses_tools_beside_built_in_ones", "functions", "json_o1", "iterable"]


@pytest.mark.parametrize("name", [*OTHERS, "tools_that_wait"])
def test_other_ways_to_ask_for_one(found, name):
    assert is_person(found[name])


def test_calls_of_several_tools(found):
    assert found["parallel_tools"]
    assert all(list(made) == ["city"] for made in found["parallel_tools"])


def test_the_completion_beside_it(found):
    person, reason = found["raw"]
    assert is_person(person)
    assert reason == "stop"

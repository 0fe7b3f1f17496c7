"""OpenAI's SDK: chats, streams, types, tools, responses, embeddings, files and batches, as its own types have them."""

import json

import pytest

pytestmark = pytest.mark.clients

GRACE = {"name": "Grace", "age": 42}
OSLO = [["get_weather", '{"city": "Oslo"}']]


@pytest.fixture(scope="module")
def found(run_client, embedder):
    return run_client("openai_sdk", embedder.url)


def test_a_stream_comes_to_the_whole_answer(found):
    assert found["chat"]["content"].startswith("aserve serves")
    assert found["chat"]["reason"] == "stop"
    assert found["chat_streamed"] == {**found["chat"], "kinds": ["chunk", "content.delta", "content.done"]}
    assert found["chat_chunks"]["equal"] is True
    assert found["chat_chunks"]["text"].startswith(found["chat"]["content"])
    assert found["chat_chunks"]["num"] == found["chat"]["usage"][1]
    assert found["completion"][0] == found["completion"][1] != ""


def test_choices_and_headers(found):
    assert found["choices"] == [[index, "length"] for index in range(3)]
    assert found["raw"] == {"named": True, "id": True}
    assert found["models"] == ["demo", "demo"]


@pytest.mark.parametrize("name", ["parse", "parse_streamed"])
def test_an_answer_of_a_type(found, name):
    assert found[name]["parsed"] == GRACE
    assert json.loads(found[name]["content"]) == GRACE


def test_a_type_with_types_in_it(found):
    """By the SDK's strict schema: references, null, lists and words of a few. Catches a keyword that is refused."""
    parsed = found["parse_nested"]["parsed"]
    assert set(parsed) == {"colour", "first", "others", "note"}
    assert parsed["colour"] in ("red", "green")
    assert len(parsed["others"]) <= 2
    assert len(parsed["first"]["label"]) <= 6


def test_what_was_parsed_goes_back_whole(found):
    """The SDK sends its own `parsed` with the message. Catches it refused, or told to the template."""
    parsed, plain = found["parsed_goes_back"]
    assert parsed == plain


def test_any_json(found):
    assert json.loads(found["json_object"]["content"]) == GRACE


def test_what_was_cut_is_not_parsed(found):
    assert found["run_on"]["raised"] == "LengthFinishReasonError"


def test_a_round_of_tools(found):
    """The model calls without being forced to, and the SDK's own messages go back as they are."""
    assert found["tools"]["calls"] == OSLO
    assert (found["tools"]["content"], found["tools"]["reason"]) == (None, "tool_calls")
    streamed = {**found["tools_streamed"], "content": found["tools_streamed"]["content"] or None}
    kinds = [kind for kind in streamed.pop("kinds") if not kind.startswith("content")]  # "" beside the role
    assert kinds == ["chunk", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"]
    assert streamed == found["tools"]
    assert found["tools_parsed"] == [["GetWeather", ["city"]]] * 2
    first, *others = [{**answer, "kinds": None} for answer in found["tools_round"]]
    assert first["content"].startswith("It is sunny in ")
    assert others == [first] * 3


def test_a_type_does_not_bar_a_call(found):
    assert found["tools_or_a_type"] == [{"city": "Oslo"}, ["degrees"]]


def test_tools_that_have_to_be_called(found):
    for name, reason in {"required": "tool_calls", "named": "stop", "allowed": "tool_calls"}.items():
        [[called, arguments]] = found["tool_choices"][name]["calls"]
        assert (called, list(json.loads(arguments))) == ("get_weather", ["city"])
        assert found["tool_choices"][name]["reason"] == reason
    assert found["tool_choices"]["none"]["calls"] == []


@pytest.mark.parametrize(
    ("name", "raised", "message"),
    [
        ("suffix", "BadRequestError", "suffix is not supported"),
        ("image", "BadRequestError", "'image_url'"),
        ("unknown_model", "NotFoundError", "other"),
        ("respond_with_a_search", "BadRequestError", "tools are functions that the client calls"),
        ("embeddings_cut", "BadRequestError", "dimensions"),
        ("embeddings_of_a_writer", "BadRequestError", "--runner pooling"),
    ],
)
def test_what_is_refused_says_so_by_its_own_class(found, name, raised, message):
    assert found[name]["raised"] == raised
    assert message in found[name]["message"]


def test_effort_and_verbosity_are_taken(found):
    """The demo model's template reads neither."""
    assert found["effort"] == [found["chat"]["content"]] * 2
    assert found["verbosity"] == found["chat"]["content"]


def test_a_response_is_kept_streamed_and_gone(found):
    text = found["chat"]["content"]
    assert found["respond"] == {
        "text": text,
        "same": True,
        "asked": ["What is aserve?"],
        "gone": "response_not_found",
    }
    assert found["respond_streamed"]["text"] == found["respond_streamed"]["deltas"] == text
    assert found["respond_streamed"]["kinds"] == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert found["respond_in_background"] == ["queued", "completed", text]
    assert found["respond_with_scores"] == [True, 2]


def test_a_response_goes_on_from_another(found):
    by_id, by_items = found["respond_further"]
    assert by_id == by_items
    assert "Grace" in by_id[0]
    assert found["count_input"] == found["chat"]["usage"][0]


def test_a_response_of_a_type(found):
    assert found["respond_parsed"] == [GRACE, GRACE]


def test_a_round_of_tools_in_responses(found):
    told = found["respond_with_tools"]
    assert told["call"] == ["get_weather", {"city": "Oslo"}]
    assert told["together"] == [["function_call"], True]
    assert "response.function_call_arguments.delta" in told["kinds"]
    assert told["answers"][0] == told["answers"][1]
    assert told["answers"][0].startswith("It is sunny in ")


def test_embeddings(found):
    """The SDK asks for base64 by itself. Catches numbers of another order of bytes, or of another size."""
    told = found["embeddings"]
    assert (told["num"], told["tokens"], told["order"]) == (256, 3, [0, 1])
    assert told["norm"] == pytest.approx(1.0, abs=1e-5)
    assert told["apart"] < 1e-6


def test_a_batch(found):
    told = found["batch"]
    assert told["status"] == "completed"
    assert told["counts"] == {"completed": 2, "failed": 1, "total": 3}
    assert set(told["texts"]) == {"a", "b"}
    assert told["texts"]["a"] == found["chat"]["content"]
    assert told["errors"] == [["c", 400]]
    assert told["listed"] is True
    assert found["batch_of_bad_lines"] == ["failed", 1]
    assert found["files"] == {"size": True, "listed": True, "same": True, "gone": True}


def test_the_client_that_waits(found):
    """Catches a stream that is cut and takes others with it."""
    assert found["many_at_once"] == [16, 32]
    assert found["helpers_that_wait"] == [GRACE] * 3

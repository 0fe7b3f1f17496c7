"""What is counted of an answer, and how choices of several prompts are numbered."""

import json
from contextlib import asynccontextmanager

from aserve.core.outputs import FinishReason, TextDelta
from aserve.core.params import SamplingParams
from aserve.core.plan import TokenScores
from aserve.http.access import Record
from aserve.http.generation import Generation, answer
from aserve.http.openai.completions import CompletionFields, TextWire
from aserve.http.sse import StreamLimits
from aserve.http.tally import Tally, usage_of
from aserve.mailbox import Mailbox
from tests.engines import scripted_engine


def test_a_prompt_counts_once_and_its_choices_each():
    tallies = [Tally(prompt) for prompt in ((1, 2, 3), (4,)) for _ in range(2)]
    for tally, num_cached in zip(tallies, (2, 2, 0, 0), strict=True):
        tally.add(TextDelta("ab", (7, 8), FinishReason.LENGTH, num_cached_tokens=num_cached))
    assert usage_of(tallies, 2) == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_scores_of_a_prompt_alone_do_not_begin_an_answer():
    tally = Tally((1, 2))
    score = TokenScores(2, -0.5, 1)
    tally.add(TextDelta("", (), prompt_scores=(score,)))
    assert not tally.has_begun
    tally.add(TextDelta("a", (7,), FinishReason.STOP, scores=(TokenScores(7, -0.1, 1),)))
    assert tally.has_begun
    completion = tally.completion(tally.prompt_scores)
    assert (completion.prompt_scores, completion.scores, completion.text) == ((score,), (TokenScores(7, -0.1, 1),), "a")


class TwoChoices:
    """As much of an engine as answers each prompt with two choices: the prompt, and the prompt again with a mark."""

    @asynccontextmanager
    async def open(self, prompt, params, **_options):
        mailbox = Mailbox(params.n)
        for index in range(params.n):
            mailbox.put(TextDelta(f"{prompt[0]}{'!' * index}", (prompt[0],), FinishReason.LENGTH, index=index))
        yield mailbox


async def test_choice_k_of_prompt_p_has_the_index_p_n_plus_k():
    replies = []

    class Exchange:
        request_id = "some-id"
        record = Record()
        warnings = ()

        async def reply(self, response):
            replies.append(response)

    fields = CompletionFields(prompt="x")
    wire = TextWire(scripted_engine(), "some-id", "model", fields, num_choices=2, echoed=["<", "["])
    generation = Generation(prompts=[(5,), (6,)], params=SamplingParams(n=2), stream=False)
    await answer(TwoChoices(), generation, wire, Exchange(), StreamLimits())
    [reply] = replies
    body = json.loads(reply.body)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "<5"),
        (1, "<5!"),
        (2, "[6"),
        (3, "[6!"),
    ]
    assert body["usage"]["prompt_tokens"] == 2

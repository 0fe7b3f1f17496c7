"""LLM: lists of prompts in one batch, from code without an event loop."""

import asyncio
import signal

import pytest

from aserve import LLM, SamplingParams
from aserve.core.errors import CheckpointError, ConfigError, InvalidRequestError, UnavailableError
from aserve.core.outputs import FinishReason

pytestmark = pytest.mark.torch

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LIMITS = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**23}


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", **LIMITS) as llm:
        yield llm


def generate(llm, prompts, params=GREEDY):
    return llm.generate(prompts, params, use_tqdm=False)


def test_prompts_are_texts_or_token_ids_one_or_several(llm):
    (one,) = generate(llm, "Once upon a time")
    assert (len(one.token_ids), one.finish_reason) == (8, FinishReason.LENGTH)
    ids = list(one.prompt_token_ids)
    two = generate(llm, ["One day", "Once upon a time"])
    assert two[1].text == one.text != two[0].text
    assert [answer.text for answer in generate(llm, ids)] == [one.text]
    assert [answer.text for answer in generate(llm, [ids, two[0].prompt_token_ids])] == [one.text, two[0].text]
    assert [answer.text for answer in generate(llm, ["One day", ids])] == [two[0].text, one.text]
    assert generate(llm, []) == []


def test_params_are_one_for_all_or_one_for_each(llm):
    each = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 5)]
    assert [len(answer.token_ids) for answer in generate(llm, ["a", "b"], each)] == [3, 5]
    with pytest.raises(ValueError, match="params: 2 given for 3 prompts"):
        generate(llm, ["a", "b", "c"], each)


def test_choice_k_of_prompt_p_is_at_p_n_plus_k(llm):
    three = SamplingParams(temperature=1.0, seed=4, max_tokens=6, n=3)
    answers = generate(llm, ["One day", "Once upon a time"], three)
    assert [answer.index for answer in answers] == [0, 1, 2, 0, 1, 2]
    assert answers[0].prompt_token_ids == answers[2].prompt_token_ids != answers[3].prompt_token_ids
    alone = [SamplingParams(temperature=1.0, seed=4 + k, max_tokens=6) for k in range(3)]
    solo = generate(llm, ["One day"] * 3 + ["Once upon a time"] * 3, alone * 2)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in solo]
    hello = [{"role": "user", "content": "Hello!"}]
    assert [answer.index for answer in llm.chat([hello, hello], three, use_tqdm=False)] == [0, 1, 2, 0, 1, 2]
    mixed = generate(llm, ["One day", "Once upon a time"], [alone[0], three])
    assert [answer.token_ids for answer in mixed] == [answer.token_ids for answer in (answers[0], *answers[3:])]


def test_without_params_the_checkpoint_decides(llm):
    (answer,) = llm.chat([{"role": "user", "content": "What is 2 + 2?"}], use_tqdm=False)
    assert answer.text


def test_a_chat_takes_one_conversation_or_several(llm):
    hello, sum_ = ([{"role": "user", "content": text}] for text in ("Hello!", "What is 7 + 5?"))
    greedy = SamplingParams(temperature=0.0, max_tokens=64)
    (one,) = llm.chat(hello, greedy, use_tqdm=False)
    two = llm.chat([sum_, hello], greedy, use_tqdm=False)
    assert one.finish_reason is FinishReason.STOP
    assert two[1].text == one.text != two[0].text
    assert llm.chat([], use_tqdm=False) == []


def test_a_progress_bar_unless_it_is_not_wanted(llm, capfd):
    llm.generate(["a", "b"], GREEDY)
    shown = capfd.readouterr()
    assert "Prompts: 100%" in shown.err
    assert "2/2" in shown.err
    assert "output tokens/s" in shown.err
    assert shown.out == ""
    generate(llm, ["a", "b"])
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("prompt", "message"), [("", "empty"), ([10**9], "token id 1000000000"), ([5] * 3000, "3000")])
def test_a_prompt_that_cannot_be_answered_raises_its_own_error_and_the_next_call_works(llm, prompt, message):
    before = generate(llm, "One day")
    with pytest.raises(InvalidRequestError, match=message):
        generate(llm, ["One day", prompt, "One day"])
    assert generate(llm, "One day")[0].token_ids == before[0].token_ids


@pytest.fixture
def heeds_ctrl_c():
    """A process that a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_a_call_and_the_next_one_works(llm):
    async def interrupt_when_running(engine):
        while not engine.statistics().num_running:  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0.001)  # and not at every turn, which would keep the GIL from the runner's thread
        signal.raise_signal(signal.SIGINT)

    before = generate(llm, "One day")
    endless = SamplingParams(temperature=0.0, ignore_eos=True)
    ctrl_c = llm._runner.get_loop().create_task(interrupt_when_running(llm._engine))
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a", "b"], endless)
    assert ctrl_c.done()
    assert llm._engine.statistics().num_used_blocks == 0
    assert generate(llm, "One day")[0].token_ids == before[0].token_ids


def test_it_cannot_be_used_where_it_would_block_an_event_loop(llm):
    async def main():
        for use in (lambda: LLM("demo"), lambda: generate(llm, "a"), lambda: llm.chat([]), llm.close):
            with pytest.raises(RuntimeError, match="use AsyncEngine"):
                use()
        return await asyncio.to_thread(generate, llm, "One day")

    assert asyncio.run(main())[0].token_ids == generate(llm, "One day")[0].token_ids


def test_closing_twice_is_closing_once():
    with LLM("demo", **LIMITS) as llm:
        assert generate(llm, "a")
    llm.close()
    with pytest.raises(UnavailableError, match="closed"):
        generate(llm, "a")
    with pytest.raises(UnavailableError, match="closed"):
        llm.chat([])


def test_a_model_or_option_that_is_wrong_is_one_error(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        LLM("demo", max_num_seq=1)

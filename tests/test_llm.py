"""LLM: lists of prompts in one batch, from code without an event loop."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from aserve import LLM, BeamParams, EngineState, SamplingParams
from aserve.core.errors import CheckpointError, ConfigError, InvalidRequestError, UnavailableError
from aserve.core.outputs import FinishReason

pytestmark = pytest.mark.torch

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
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


def when_running(llm, act):
    """In a thread: wait until something runs, then act."""

    def wait():
        while not llm.statistics().num_running:
            time.sleep(0.001)
        return act()

    return ThreadPoolExecutor(1).submit(wait)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_a_call_and_the_next_one_works(llm):
    before = generate(llm, "One day")
    ctrl_c = when_running(llm, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["a", "b"], ENDLESS)
    ctrl_c.result()
    assert llm.statistics().num_used_blocks == 0
    assert generate(llm, "One day")[0].token_ids == before[0].token_ids


def test_p5_it_works_where_an_event_loop_is_running_as_in_a_notebook(llm):
    async def cell():
        with LLM("demo", **LIMITS) as own:
            return generate(own, "One day"), generate(llm, "One day"), await asyncio.to_thread(generate, llm, "One day")

    answers = asyncio.run(cell())
    assert [[answer.text for answer in each] for each in answers] == [[generate(llm, "One day")[0].text]] * 3


def test_p5_threads_share_it(llm):
    prompts = [f"{number} and" for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda prompt: generate(llm, prompt)[0], prompts))
    assert together == generate(llm, prompts)


def test_p7_an_aborted_request_comes_back_with_what_it_has(llm):
    aborting = when_running(llm, lambda: llm.abort("long"))
    asked = [ENDLESS, GREEDY]
    long, short = llm.generate(
        ["a", "b"], asked, use_tqdm=False, request_ids=["long", "short"], priority=1, timeout_s=9e8
    )
    assert aborting.result() is True
    assert (long.finish_reason, short.finish_reason) == (FinishReason.ABORT, FinishReason.LENGTH)
    assert llm.abort("long") is False
    with pytest.raises(ValueError, match="request_ids: 1 given for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False, request_ids=["one"])


def test_p7_what_the_engine_can_it_can(llm):
    ids = llm.encode("Once upon a time")
    assert llm.decode(ids) == "Once upon a time"
    assert llm.info.names == ("demo",)
    assert llm.statistics().num_running == 0
    best = llm.beam_search("Once upon a time", BeamParams(width=3), n=2, max_tokens=4)
    assert [answer.index for answer in best] == [0, 1]
    assert best[0].cumulative_logprob >= best[1].cumulative_logprob
    (answer,) = generate(llm, ids)
    assert 0 <= answer.timings.queued_s <= answer.timings.first_token_s <= answer.timings.total_s
    assert repr(llm) == "<LLM <AsyncEngine 'demo' ready>>"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(b"hi"), "prompts must be a text, .*, got b'hi'"),
        (
            lambda llm: llm.generate([b"hi"], use_tqdm=False),
            "prompt must be a text or a sequence of token ids, got b'hi'",
        ),
        (lambda llm: llm.generate([True], use_tqdm=False), "prompt must be .*, got True"),
        (lambda llm: llm.generate("a", 5), "params must be SamplingParams, or a sequence of them, got 5"),
        (lambda llm: llm.chat("hi"), "conversations must be a sequence of messages, .*, got 'hi'"),
        (lambda llm: llm.generate("a", cache_salt=5, use_tqdm=False), "cache_salt must be .*, got 5"),
        (lambda llm: llm.beam_search("a", 4), "beam must be BeamParams, got 4"),
    ],
)
def test_p4_what_cannot_be_is_said_in_a_line(llm, call, message):
    with pytest.raises(InvalidRequestError, match=message):
        call(llm)


def test_p5_one_that_is_forgotten_is_closed_whichever_thread_collects_it():
    async def collect():
        return gc.collect()

    forgotten = LLM("demo", **LIMITS)
    engine, thread = forgotten._engine, forgotten._thread
    cycle = [forgotten]
    cycle.append(cycle)
    del forgotten, cycle
    assert thread.run(collect()) > 0
    thread._thread.join(60)
    assert not thread._thread.is_alive()
    assert engine.state is EngineState.CLOSED


def run_script(*lines):
    """A program of its own that makes an LLM, does this with it, and never closes it."""
    head = "import os, signal, threading, time", "from aserve import LLM, SamplingParams"
    made = 'llm = LLM("demo", device="cpu", kv_cache_memory_bytes=2**23)'
    forks = "ignore:This process:DeprecationWarning"  # which Python gives to whoever has threads
    command = [sys.executable, "-W", "error", "-W", forks, "-c", "\n".join((*head, made, *lines))]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.e2e
@pytest.mark.slow
def test_p5_a_script_that_never_closes_it_ends_in_silence():
    done = run_script('print(len(llm.generate("One day", SamplingParams(max_tokens=3), use_tqdm=False)))')
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.e2e
@pytest.mark.slow
def test_p5_ctrl_c_ends_a_script_that_never_closes_it():
    done = run_script(
        "signal.signal(signal.SIGINT, signal.default_int_handler)",
        "def press():",
        "    while not llm.statistics().num_running: time.sleep(0.001)",
        "    os.kill(os.getpid(), signal.SIGINT)",
        "threading.Thread(target=press).start()",
        'llm.generate(["One day"] * 4, SamplingParams(ignore_eos=True), use_tqdm=False)',
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_closing_twice_is_closing_once():
    before = set(threading.enumerate())
    with LLM("demo", **LIMITS) as llm:
        assert generate(llm, "a")
    llm.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(UnavailableError, match="closed"):
        generate(llm, "a")
    with pytest.raises(UnavailableError, match="closed"):
        llm.chat([])


@pytest.mark.e2e
@pytest.mark.slow
def test_a_forked_process_is_told_to_make_its_own():
    """The fault: whatever it did with the one of its parent, it waited for ever."""
    done = run_script(
        "def act(what):",
        "    global llm",
        "    try:",
        "        if what == 'generate': llm.generate('One day', use_tqdm=False)",
        "        elif what == 'close': llm.close()",
        "        else: del llm",
        "        print(what, flush=True)",
        "    except Exception as error: print(f'{type(error).__name__}: {error}', flush=True)",
        "    finally: os._exit(7)",
        "for what in ('generate', 'close', 'forget'):",
        "    if not (child := os.fork()):",
        "        signal.alarm(10)",
        "        act(what)",
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)",
        "print(len(llm.generate('One day', SamplingParams(max_tokens=3), use_tqdm=False)))",
    )
    told = "UnavailableError: no thread outlives a fork: a forked process has to make its own LLM"
    assert done.stdout.splitlines() == [told, "7", "close", "7", "forget", "7", "1"], done.stderr
    assert done.returncode == 0


def test_a_model_or_option_that_is_wrong_is_one_error(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        LLM("demo", max_num_seq=1)


@pytest.mark.parametrize(
    ("given", "expected"), [({}, 0.0), ({"target_itl_ms": None}, None), ({"target_itl_ms": 20.0}, 20.0)]
)
def test_nobody_reads_along_so_that_steps_have_no_bound_unless_one_is_given(monkeypatch, given, expected):
    def no_engine(model, **options):
        raise ConfigError(str(options["target_itl_ms"]))

    monkeypatch.setattr("aserve.llm.AsyncEngine", no_engine)
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        LLM("demo", **given)

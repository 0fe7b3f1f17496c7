from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.ids import RequestId
from aserve.core.outputs import FinishReason, SeqDelta, TextDelta
from aserve.core.params import SamplingParams
from aserve.core.plan import TokenScores
from aserve.text.stop_strings import StopMatcher
from aserve.text.stream import TextStream, VectorStream
from tests.engines import EOS as END
from tests.engines import byte_tokenizer
from tests.text import checkpoints

TOKENIZERS = [checkpoints.byte_level(), checkpoints.sentencepiece()]
BYTE_LEVEL, SENTENCEPIECE = TOKENIZERS
BYTES = byte_tokenizer()
EOS = BYTE_LEVEL.eos_id
TOOL = BYTE_LEVEL.vocab_size - 1


def delta(token_ids, finish_reason=None, stop_reason=None):
    return SeqDelta(RequestId("r"), tuple(token_ids), finish_reason, stop_reason)


def chunked(token_ids, sizes, finish_reason, stop_reason):
    """token_ids as deltas of the given sizes; the last has the rest and the end."""
    start = 0
    for size in sizes:
        if start + size < len(token_ids):
            yield delta(token_ids[start : start + size])
            start += size
    yield delta(token_ids[start:], finish_reason, stop_reason)


def push_all(tokenizer, params, deltas, **options):
    stream = TextStream(tokenizer, params, **options)
    return [text for each in deltas if (text := stream.push(each)) is not None]


def whole(text_deltas):
    merged = text_deltas[0]
    for later in text_deltas[1:]:
        merged = merged.merge(later)
    return merged


@st.composite
def sequences(draw):
    """A tokenizer, parameters that often stop, tokens, how they end, and a way to cut them."""
    tokenizer = draw(st.sampled_from(TOKENIZERS))
    text = draw(st.text("ab c🤖", max_size=12) | st.sampled_from(checkpoints.SENTENCES))
    token_ids = list(tokenizer.encode(text, add_special_tokens=False))
    token_ids += draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8))
    shown = tokenizer.decode(token_ids, skip_special_tokens=True) or "?"
    starts = st.integers(0, len(shown) - 1)
    stops = draw(
        st.lists(st.tuples(starts, st.integers(1, 4)).map(lambda at: shown[at[0] : at[0] + at[1]]), max_size=3)
    )
    min_tokens = draw(st.integers(0, 4))
    finish_reason, stop_reason = draw(
        st.sampled_from([(FinishReason.STOP, None), (FinishReason.STOP, 7), (FinishReason.LENGTH, None)])
    )
    token_ids.append(EOS if stop_reason is None and finish_reason is FinishReason.STOP else 70)
    sizes = draw(st.lists(st.integers(1, 3), max_size=30))
    params = SamplingParams(stop=tuple(stops), min_tokens=min_tokens)
    return tokenizer, params, token_ids, finish_reason, stop_reason, sizes


def oracle(tokenizer, params, token_ids, finish_reason, stop_reason):
    """The terminal answer by brute force: decode every prefix, search every stop string anew."""
    ended_by_model = finish_reason is FinishReason.STOP and stop_reason is None
    shown_ids = token_ids[:-1] if ended_by_model else token_ids
    pieces = [tokenizer.text_bytes[token_id] for token_id in shown_ids]

    def stable(num_tokens):
        raw = b"".join(pieces[:num_tokens])
        text = raw.decode(errors="replace")
        for cut in range(1, 4):  # drop a character that is not finished
            try:
                raw[-cut:].decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data" and error.start == 0:
                    text = raw[:-cut].decode(errors="replace")
        return text.removeprefix(tokenizer.text_bytes.leading)

    unmatched = stable(min(params.min_tokens, len(pieces)))
    final = b"".join(pieces).decode(errors="replace").removeprefix(tokenizer.text_bytes.leading)
    searches = len(pieces) >= params.min_tokens
    for num_tokens in range(params.min_tokens + 1, len(pieces) + 2 if searches else 0):
        at_end = num_tokens > len(pieces)
        text = (final if at_end else stable(num_tokens)).removeprefix(unmatched)
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in params.stop if stop in text]
        if ends:
            end, _, stop = min(ends)
            seen = token_ids if at_end else token_ids[:num_tokens]
            return TextDelta(unmatched + text[: end - len(stop)], tuple(seen), FinishReason.STOP, stop)
    return TextDelta(final, tuple(token_ids), finish_reason, stop_reason)


def check_chunks(tokenizer, params, token_ids, finish_reason, stop_reason, sizes):
    expected = oracle(tokenizer, params, token_ids, finish_reason, stop_reason)
    deltas = chunked(token_ids, sizes, finish_reason, stop_reason)
    assert whole(push_all(tokenizer, params, deltas)) == expected, "I20: in pieces"
    at_once = [delta(token_ids, finish_reason, stop_reason)]
    assert whole(push_all(tokenizer, params, at_once)) == expected, "I20: at once"


@given(sequences())
def test_any_chunking_gives_the_same_text_end_and_tokens(sequence):
    check_chunks(*sequence)


def test_a_stop_string_that_is_told_would_be_noticed(monkeypatch):
    """A planted fault: pieces are told as they come, with the beginnings of stop strings."""
    monkeypatch.setattr(StopMatcher, "feed", lambda _matcher, text: text)
    with pytest.raises(AssertionError, match="I20"):
        check_chunks(
            BYTE_LEVEL,
            SamplingParams(stop=("b",)),
            list(BYTE_LEVEL.encode("abc", add_special_tokens=False)),
            FinishReason.LENGTH,
            None,
            [1, 1],
        )


@given(sequences())
def test_what_is_shown_is_whole_characters_and_grows_to_the_answer(sequence):
    tokenizer, params, token_ids, finish_reason, stop_reason, sizes = sequence
    deltas = push_all(tokenizer, params, chunked(token_ids, sizes, finish_reason, stop_reason))
    assert [each.finish_reason is None for each in deltas] == [True] * (len(deltas) - 1) + [False]
    if params.min_tokens == 0:
        assert not any(stop in whole(deltas).text for stop in params.stop)
    valid = b"".join(tokenizer.text_bytes[token_id] for token_id in token_ids)
    if "\ufffd" not in valid.decode(errors="replace"):
        assert not any("\ufffd" in each.text for each in deltas)


@given(sequences())
def test_all_text_that_is_certain_is_shown_at_once(sequence):
    """One token a step: after each, what is missing is an unfinished character or a possible stop string."""
    tokenizer, params, token_ids, _, _, _ = sequence
    stream = TextStream(tokenizer, params)
    shown, raw = "", b""
    for token_id in token_ids:
        answer = stream.push(delta([token_id]))
        assert answer is not None
        shown += answer.text
        raw += tokenizer.text_bytes[token_id]
        if answer.finish_reason is not None:
            return
        missing = raw.decode(errors="replace").removeprefix(tokenizer.text_bytes.leading)[len(shown) :]
        held = missing.removesuffix("\ufffd")
        assert held == "" or any(stop.startswith(held) and stop != held for stop in params.stop)


def test_the_token_that_ends_a_text_is_reported_and_not_shown():
    [the_end] = push_all(BYTE_LEVEL, SamplingParams(), [delta([70, EOS], FinishReason.STOP)])
    assert the_end == TextDelta(BYTE_LEVEL.decode([70]), (70, EOS), FinishReason.STOP)


def test_a_model_may_end_with_a_token_that_is_not_special():
    [the_end] = push_all(BYTE_LEVEL, SamplingParams(), [delta([70, TOOL], FinishReason.STOP)])
    assert the_end.text == BYTE_LEVEL.decode([70])


def test_a_stop_token_is_shown_unless_it_is_special():
    [kept] = push_all(BYTE_LEVEL, SamplingParams(), [delta([70, TOOL], FinishReason.STOP, TOOL)])
    assert (kept.text, kept.stop_reason) == (BYTE_LEVEL.decode([70]) + "<tool>", TOOL)
    im_end = BYTE_LEVEL.encode("<|im_end|>")[0]
    [dropped] = push_all(BYTE_LEVEL, SamplingParams(), [delta([70, im_end], FinishReason.STOP, im_end)])
    assert (dropped.text, dropped.stop_reason) == (BYTE_LEVEL.decode([70]), im_end)


def test_a_stop_string_ends_the_stream_at_its_token():
    token_ids = BYTE_LEVEL.encode("fox END dog")
    stream = TextStream(BYTE_LEVEL, SamplingParams(stop=(" END",)))
    answer = stream.push(delta(token_ids))
    assert answer is not None
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("fox", FinishReason.STOP, " END")
    assert BYTE_LEVEL.decode(answer.token_ids) == "fox END"
    assert stream.stopped
    assert stream.push(delta([70])) is None
    assert stream.push(delta([EOS], FinishReason.STOP)) is None


def test_a_stop_string_in_the_last_tokens_wins_over_the_length():
    token_ids = BYTE_LEVEL.encode("fox END")
    answer = whole(push_all(BYTE_LEVEL, SamplingParams(stop=(" END",)), [delta(token_ids, FinishReason.LENGTH)]))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("fox", FinishReason.STOP, " END")


def test_what_was_held_back_is_shown_at_the_end():
    token_ids = BYTE_LEVEL.encode("fox EN")
    stream = TextStream(BYTE_LEVEL, SamplingParams(stop=(" END",)))
    held = stream.push(delta(token_ids))
    assert held is not None
    assert held.text == "fox"
    assert stream.push(delta([EOS], FinishReason.STOP)) == TextDelta(" EN", (EOS,), FinishReason.STOP)


def test_text_of_the_first_min_tokens_is_not_searched():
    token_ids = BYTE_LEVEL.encode("END END")
    num_first = len(BYTE_LEVEL.encode("END"))
    params = SamplingParams(stop=("END",), min_tokens=num_first)
    answer = whole(push_all(BYTE_LEVEL, params, [delta(token_ids)]))
    assert (answer.text, answer.stop_reason) == ("END ", "END")

    cut = BYTE_LEVEL.encode("🤖")[:1]
    params = SamplingParams(stop=("\ufffd",), min_tokens=2)
    answer = whole(push_all(BYTE_LEVEL, params, [delta(cut, FinishReason.LENGTH)]))
    assert (answer.text, answer.finish_reason) == ("\ufffd", FinishReason.LENGTH)


def test_a_continued_text_keeps_the_space_before_its_first_word():
    the_dog = SENTENCEPIECE.encode("the dog", add_special_tokens=False)
    deltas = [delta(the_dog, FinishReason.LENGTH)]
    assert whole(push_all(SENTENCEPIECE, SamplingParams(), deltas)).text == "the dog"
    assert whole(push_all(SENTENCEPIECE, SamplingParams(), deltas, keep_leading_space=True)).text == " the dog"


@pytest.mark.parametrize("finish_reason", [FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH])
def test_an_end_without_tokens_is_told_and_flushes(finish_reason):
    stream = TextStream(BYTE_LEVEL, SamplingParams(stop=("og",)))
    assert stream.push(delta([])) is None
    shown = stream.push(delta(BYTE_LEVEL.encode("do")))
    assert shown is not None
    assert shown.text == "d"
    assert stream.push(delta([], finish_reason)) == TextDelta("o", (), finish_reason)


def test_a_stop_string_is_shown_when_asked_for_and_what_follows_is_not():
    token_ids = [*b"one two three"]
    params = SamplingParams(stop=("two",), include_stop_str_in_output=True)
    for sizes in ([], [1] * 20, [6, 2, 9]):
        final = whole(push_all(BYTES, params, chunked(token_ids, sizes, FinishReason.LENGTH, None)))
        assert (final.text, final.finish_reason, final.stop_reason) == ("one two", FinishReason.STOP, "two")
        assert final.token_ids == tuple(b"one two")


def test_the_ending_token_is_shown_when_asked_for_unless_it_is_special():
    token_ids = [*b"hi", END]
    ending = [(None, True), (None, False), (END, True)]
    for stop_reason, skip_special_tokens in ending:
        params = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=skip_special_tokens)
        final = whole(push_all(BYTES, params, [delta(token_ids, FinishReason.STOP, stop_reason)]))
        assert final.text == ("hi" if skip_special_tokens else "hi<|end|>")


def test_special_tokens_are_shown_when_asked_for():
    params = SamplingParams(skip_special_tokens=False, stop=("b<|end|>c",))
    final = whole(push_all(BYTES, params, [delta([*b"a", END, *b"b", END, *b"cd"], FinishReason.LENGTH)]))
    assert (final.text, final.stop_reason) == ("a<|end|>", "b<|end|>c")
    hidden = whole(push_all(BYTES, SamplingParams(), [delta([*b"a", END, *b"b", END], FinishReason.STOP)]))
    assert hidden.text == "ab"


def test_scores_are_cut_where_the_tokens_are():
    token_ids = tuple(b"one two three")
    scores = tuple(TokenScores(token_id, -0.5, 1) for token_id in token_ids)
    prompt_scores = (TokenScores(7, -1.0, 2),)
    stream = TextStream(BYTES, SamplingParams(stop=("two",)))
    begins = SeqDelta(RequestId("r"), (), prompt_scores=prompt_scores, index=3)
    ends = SeqDelta(RequestId("r"), token_ids, FinishReason.LENGTH, scores=scores, index=3, cumulative_logprob=-6.5)
    first, last = stream.push(begins), stream.push(ends)
    assert (first.text, first.token_ids, first.prompt_scores, first.index) == ("", (), prompt_scores, 3)
    assert (last.token_ids, last.scores) == (token_ids[:7], scores[:7])
    assert (last.prompt_scores, last.index, last.cumulative_logprob) == ((), 3, -6.5)


@given(sequences(), st.booleans())
def test_a_token_that_is_not_pushed_to_a_plain_stream_has_the_text_that_pushing_gives(sequence, skip_special_tokens):
    tokenizer, params, token_ids, *_ = sequence
    params = msgspec.structs.replace(params, skip_special_tokens=skip_special_tokens)
    short, long = TextStream(tokenizer, params), TextStream(tokenizer, params)
    for token_id in token_ids:
        pushed = long.push(delta([token_id]))
        if pushed is None:
            return
        text = tokenizer.token_texts[token_id]
        if text is None or not short.is_plain:
            assert short.push(delta([token_id])) == pushed
        else:
            assert pushed == TextDelta(text, (token_id,))
        assert short.is_plain == long.is_plain


def test_a_stream_is_plain_once_its_leading_space_is_settled_and_between_characters():
    stream = TextStream(SENTENCEPIECE, SamplingParams())
    the = SENTENCEPIECE.encode("the", add_special_tokens=False)[0]
    assert SENTENCEPIECE.token_texts[the] == " the"
    assert not stream.is_plain
    assert stream.push(delta([SENTENCEPIECE.bos_id])).text == ""
    assert not stream.is_plain  # the space is still to be dropped
    assert stream.push(delta([the])).text == "the"
    assert stream.is_plain
    first, *others = BYTE_LEVEL.encode("\N{ROBOT FACE}")
    stream = TextStream(BYTE_LEVEL, SamplingParams())
    assert BYTE_LEVEL.token_texts[first] is None
    stream.push(delta([first]))
    assert not stream.is_plain
    stream.push(delta(others))
    assert stream.is_plain
    for params in (SamplingParams(stop=("x",)), SamplingParams(skip_special_tokens=False)):
        stream = TextStream(BYTE_LEVEL, params)
        stream.push(delta([70]))
        assert not stream.is_plain


def test_a_vector_has_no_text():
    delta = SeqDelta(RequestId("a"), (), FinishReason.STOP, num_cached_tokens=3, vector=array("f", [1.0]))
    assert VectorStream().push(delta) == TextDelta("", (), FinishReason.STOP, num_cached_tokens=3, vector=delta.vector)

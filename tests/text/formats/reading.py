"""Running parsers in tests."""

from aserve.core.answer_events import Arguments, CallBegins, CallEnds, Content, Reasoning
from aserve.text.formats.families import CALLS, CHANNELS, THOUGHTS
from aserve.text.formats.parser import parser_of
from aserve.text.formats.syntax import AnswerFormat
from tests.text.formats.examples import EXAMPLES, SCHEMAS


def format_named(calls, thoughts=None):
    if calls in CHANNELS:
        return AnswerFormat(channels=CHANNELS[calls])
    return AnswerFormat(calls=CALLS.get(calls, ()), thoughts=THOUGHTS.get(thoughts))


FORMATS = {name: format_named(example.calls, example.thoughts or "think") for name, example in EXAMPLES.items()}


def joined(events):
    """Texts that follow each other are one."""
    made = []
    for event in events:
        last = made[-1] if made else None
        is_text = isinstance(event, (Content, Reasoning, Arguments))
        if is_text and type(last) is type(event) and getattr(last, "index", 0) == getattr(event, "index", 0):
            fields = {"text": last.text + event.text}
            made[-1] = type(event)(**fields) if not isinstance(event, Arguments) else Arguments(event.index, **fields)
        else:
            made.append(event)
    return made


def events_of(format, chunks, *, in_thought=False, schemas=SCHEMAS):
    """All events of a text that comes in these chunks, not joined."""
    parser = parser_of(format, schemas, in_thought=in_thought)
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()


def parsed(format, text, **options):
    """Reasoning, content, and calls as (name, arguments, id), of a text at once."""
    return told(events_of(format, [text], **options))


def told(events):
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    begun = [event for event in events if isinstance(event, CallBegins)]
    ended = [event.index for event in events if isinstance(event, CallEnds)]
    assert [event.index for event in begun] == list(range(len(begun))) == ended
    texts = ["".join(e.text for e in events if isinstance(e, Arguments) and e.index == b.index) for b in begun]
    return reasoning, content, [(b.name, text, b.call_id) for b, text in zip(begun, texts, strict=True)]

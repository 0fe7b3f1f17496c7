"""Blocks: an answer's content as the Messages API has it, in pieces, and whole, as a client puts them together.

    text --> the model's parser --> events --> content_block_start, _delta ..., _stop --> content_of --> [block, ...]

A block is text, thoughts or a call. An answer has one at least: where nothing was said, an empty text.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from aserve.core.answer_events import AnswerEvent, Arguments, CallBegins, Content, Reasoning
from aserve.core.outputs import FinishReason
from aserve.http.anthropic.partial_json import partial_object
from aserve.http.reading import Reading

Piece = dict[str, Any]


class Blocks:
    """Of one answer. omits_thoughts: their blocks are there, without the text. num_calls: that have begun."""

    def __init__(self, reading: Reading, *, omits_thoughts: bool = False) -> None:
        self._reading = reading
        self._parser = None if reading.new_parser is None else reading.parser()
        self._omits_thoughts = omits_thoughts
        self._index = -1
        self._kind: str | None = None
        self._signature = hashlib.sha256()
        self._pieces: list[Piece] = []
        self.num_calls = 0

    def begin(self) -> list[Piece]:
        """What comes before the answer's first text: where there is only text, its block."""
        if self._parser is None:
            self._open("text", {"text": ""})
        return self._taken()

    def more(self, text: str, finish_reason: FinishReason | None) -> list[Piece]:
        """What more text comes to; all that is left at the end."""
        for event in self._events(text, is_last=finish_reason is not None):
            self._take(event)
        if finish_reason is not None:
            if self._index < 0:
                self._open("text", {"text": ""})
            self._close()
        return self._taken()

    def _events(self, text: str, *, is_last: bool) -> list[AnswerEvent]:
        if self._parser is None:
            return [Content(text)] if text else []
        return [*self._parser.feed(text), *(self._parser.finish() if is_last else ())]

    def _take(self, event: AnswerEvent) -> None:
        if isinstance(event, Content):
            self._open("text", {"text": ""})
            self._add({"type": "text_delta", "text": event.text})
        elif isinstance(event, Reasoning):
            self._open("thinking", {"thinking": "", "signature": ""})
            self._signature.update(event.text.encode(errors="surrogatepass"))
            if not self._omits_thoughts:
                self._add({"type": "thinking_delta", "thinking": event.text})
        elif event.index > 0 and self._reading.is_single:
            return
        elif isinstance(event, CallBegins):
            self._close()
            self.num_calls += 1
            call_id = event.call_id or self._reading.new_id()
            self._open("tool_use", {"id": call_id, "name": event.name, "input": {}})
        elif isinstance(event, Arguments):
            self._add({"type": "input_json_delta", "partial_json": event.text})
        else:
            self._close()

    def _open(self, kind: str, fields: dict[str, Any]) -> None:
        """A block of that kind, unless it is open."""
        if self._kind == kind:
            return
        self._close()
        self._index += 1
        self._kind = kind
        block = {"type": kind, **fields}
        self._pieces.append({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self) -> None:
        if self._kind is None:
            return
        if self._kind == "thinking":
            self._add({"type": "signature_delta", "signature": self._signature.hexdigest()})
            self._signature = hashlib.sha256()
        self._pieces.append({"type": "content_block_stop", "index": self._index})
        self._kind = None

    def _add(self, delta: Piece) -> None:
        self._pieces.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces


def content_of(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """The blocks that pieces come to. Of a call's input, what is JSON: a call may have been cut."""
    blocks: list[dict[str, Any]] = []
    texts: list[dict[str, list[str]]] = []
    for piece in pieces:
        if piece["type"] == "content_block_start":
            blocks.append(dict(piece["content_block"]))
            texts.append({})
        elif piece["type"] == "content_block_delta":
            for name, text in piece["delta"].items():
                if name != "type":
                    texts[-1].setdefault(name, []).append(text)
    for block, parts in zip(blocks, texts, strict=True):
        block |= {name: "".join(found) for name, found in parts.items()}
        if "partial_json" in block:
            block["input"] = partial_object(block.pop("partial_json"))
    return blocks

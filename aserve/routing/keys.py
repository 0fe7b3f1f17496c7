"""PromptKeys: names for the beginnings of a prompt, made of its text, since who stands in front has no tokenizer.

    root = what else decides what is computed: namespace, model, salt, template arguments, whether it is a chat
    text = tools, system, messages (or the prompt) as JSON, in the order in which templates render them
    hashes[i] = 32 bits of blake2b(root + text up to ends[i])

    ends, in bytes     256  512 ... 4096  4352 ... 8192  8704 ...     each 1/16 of its position behind the one before,
                                                                      but no less than 256

Two prompts have their first n hashes in common if their texts are equal up to ends[n - 1]; a conversation that goes on
keeps those of its earlier turns. Ends that grow apart make few hashes of a long text (103 of 800 KB), and of how much
of it is known they are wrong by a sixteenth at most. See docs/adr/0024-routing-by-cached-prefix.md.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final

import msgspec

FIRST_BYTES: Final = 256
"""Between the first ends: about 64 tokens."""
GROWTH: Final = 16
MAX_TEXT_BYTES: Final = 1 << 20
"""Of a prompt, from its beginning, that is looked at: about 250 000 tokens."""
HASH_BITS: Final = 32

_ROOT_FIELDS: Final = ("model", "cache_salt", "chat_template", "chat_template_kwargs", "reasoning_effort", "documents")
_LEADING_FIELDS: Final = ("tools", "system", "instructions")
_BODY_FIELDS: Final = ("messages", "prompt", "input")
_SESSION_FIELDS: Final = ("prompt_cache_key", "conversation", "previous_response_id")
_SESSION_HEADER: Final = "x-session-id"
_MAX_SESSION_CHARS: Final = 256
_encode: Final = msgspec.json.encode


def _all_ends() -> Iterator[int]:
    end = 0
    while (end := end + max(FIRST_BYTES, end // GROWTH)) <= MAX_TEXT_BYTES:
        yield end


ENDS: Final = tuple(_all_ends())
"""Where the beginnings end that have a name, in bytes."""


class PromptKeys(msgspec.Struct, frozen=True, gc=False):
    """hashes: of the beginnings that end at ENDS, the shortest first. num_bytes: of the text that was looked at.

    bytes_per_token: of text of which it is known (token ids); None where it is the tokenizer's business.
    """

    hashes: tuple[int, ...] = ()
    num_bytes: int = 0
    bytes_per_token: float | None = None

    def end(self, num_hashes: int) -> int:
        """Bytes that the first so many hashes name."""
        return ENDS[min(num_hashes, len(ENDS)) - 1] if num_hashes else 0


NO_KEYS: Final = PromptKeys()
"""Those of a request of whose prompt nothing is known."""


def keys_of(fields: Mapping[str, Any], namespace: str = "") -> PromptKeys:
    """Those of the JSON body of a request that generates: chat, completion, response or message. Never raises.

    namespace: requests of different ones have no keys in common. A body that is none of these has `NO_KEYS`. Of several
    prompts in one request, the first.
    """
    try:
        of = next((name for name in _BODY_FIELDS if fields.get(name) is not None), None)
        if of is None:
            return NO_KEYS
        root = _encode([namespace, of, [fields.get(name) for name in _ROOT_FIELDS]])
        leading = [fields[name] for name in _LEADING_FIELDS if fields.get(name) is not None]
        body = fields[of]
        if (token_ids := _as_token_ids(body)) is not None:
            return PromptKeys(_hashes(root, token_ids), len(token_ids), float(array("I").itemsize))
        text = _text(leading, body)
    except (TypeError, ValueError, OverflowError, AttributeError, RecursionError):  # what JSON cannot say, or no body
        return NO_KEYS
    return PromptKeys(_hashes(root, text), len(text))


def has_one_prompt(fields: Mapping[str, Any]) -> bool:
    """Whether a body has no more than the one prompt of which `keys_of` tells."""
    prompt = fields.get("prompt")
    return not (isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], (list, str)))


def session_of(fields: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """What a client calls its session: the header x-session-id, else one of the body's fields; "" where it says none.

    headers: by lower-case name.
    """
    named = (headers.get(_SESSION_HEADER), *(fields.get(name) for name in _SESSION_FIELDS))
    for name in named:
        found = name.get("id") if isinstance(name, Mapping) else name
        if isinstance(found, str) and found:
            return found[:_MAX_SESSION_CHARS]
    return ""


def _as_token_ids(body: Any) -> bytes | None:
    """A prompt of token ids as bytes; None where it is a text."""
    if isinstance(body, list) and body and isinstance(body[0], list):
        body = body[0]
    if not (isinstance(body, list) and body and isinstance(body[0], int)):
        return None
    return array("I", body[: MAX_TEXT_BYTES // array("I").itemsize]).tobytes()


def _text(leading: Iterable[Any], body: Any) -> bytes:
    """JSON of what leads and of each message, one behind the other: a list that grows at its end, grows at its end."""
    pieces: list[bytes] = [_encode(value) for value in leading]
    if isinstance(body, list) and body and isinstance(body[0], str):
        body = body[0]  # several prompts
    if isinstance(body, str):
        pieces.append(body[:MAX_TEXT_BYTES].encode(errors="replace"))
    else:
        num_bytes = sum(map(len, pieces))
        for message in body:
            if num_bytes > MAX_TEXT_BYTES:
                break
            pieces.append(_encode(message))
            num_bytes += len(pieces[-1])
    return b"".join(pieces)[:MAX_TEXT_BYTES]


def _hashes(root: bytes, text: bytes) -> tuple[int, ...]:
    state, view, start = blake2b(root, digest_size=HASH_BITS // 8), memoryview(text), 0
    state.update(b"\0")
    hashes = []
    for end in ENDS[: bisect_right(ENDS, len(text))]:
        state.update(view[start:end])
        hashes.append(int.from_bytes(state.copy().digest(), "little"))
        start = end
    return tuple(hashes)

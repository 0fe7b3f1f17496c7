"""What of a body is looked at before it is decoded."""

from types import SimpleNamespace

import pytest

from aserve.core.errors import InvalidRequestError
from aserve.http.openai.glance import text_glance


class Texts:
    """Notes what it is asked about."""

    def __init__(self) -> None:
        self.prompts: list[bytes] = []
        self.nums_decoded: list[int] = []

    def check_json(self, prompt: bytes, *, must_fit: bool) -> None:
        assert not must_fit
        self.prompts.append(prompt)

    def check_num_decoded(self, token_ids: range) -> None:
        self.nums_decoded.append(len(token_ids))


def test_tokens_to_decode_are_counted_and_a_text_is_measured():
    texts = Texts()
    glance = text_glance(SimpleNamespace(texts=texts))
    glance({"prompt": b'"some words"'})
    glance({"tokens": b"[1,22,3]"})
    glance({"tokens": b'["no tokens"]'})
    assert texts.prompts == [b'"some words"', b"", b""]
    assert texts.nums_decoded == [3]


def test_prompts_that_are_no_text_are_named():
    with pytest.raises(InvalidRequestError, match="prompt: expected str, got array"):
        text_glance(SimpleNamespace(texts=Texts()))({"prompt": b"[1]"})

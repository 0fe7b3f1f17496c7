"""Errors as they are sent: status, shape, and nothing in them that a client could use."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException

from aserve.core.errors import (
    AserveError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    InsufficientMemoryError,
    InvalidRequestError,
    ModelNotFoundError,
    NonFiniteLogitsError,
    OverloadedError,
    StepFailedError,
    StoreError,
    UnavailableError,
)
from aserve.http.errors import HttpError, echo, error_body, error_response, printable


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequestError("m", "top_p"), 400, "invalid_request_error", "top_p", "invalid_request_error"),
        (ContextLengthError("m", "prompt"), 400, "invalid_request_error", "prompt", "context_length_exceeded"),
        (ModelNotFoundError("m"), 404, "invalid_request_error", "model", "model_not_found"),
        (OverloadedError("m"), 429, "rate_limit_error", None, "engine_overloaded"),
        (UnavailableError("m"), 503, "server_error", None, "engine_unavailable"),
        (StoreError("m"), 503, "server_error", None, "store_unavailable"),
        (NonFiniteLogitsError(), 500, "server_error", None, "nan_logits"),
        (StepFailedError("ValueError", "f00"), 500, "server_error", None, "engine_error"),
        (InsufficientMemoryError("m"), 503, "server_error", None, "insufficient_memory"),
        (ConfigError("m"), 500, "server_error", None, "config_error"),
        (CheckpointError("m"), 500, "server_error", None, "checkpoint_error"),
        (AserveError("m"), 500, "server_error", None, "server_error"),
        (HttpError(413, "request_too_large", "m"), 413, "invalid_request_error", None, "request_too_large"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_has_its_status_and_code(error, status, kind, param, code):
    response = error_response(error)
    assert response.status_code == status
    assert json.loads(response.body) == {
        "error": {"message": error.message, "type": kind, "param": param, "code": code}
    }
    assert ("retry-after" in response.headers) == (status in (429, 503))


def test_retry_after_and_the_errors_own_headers_are_sent():
    assert error_response(UnavailableError("m", retry_after_s=7)).headers["retry-after"] == "7"
    assert error_response(HttpError(405, "c", "m", {"Allow": "GET"})).headers["allow"] == "GET"
    assert error_response(HTTPException(405, headers={"Allow": "PUT"})).headers["allow"] == "PUT"
    assert json.loads(error_body(HTTPException(418)))["error"]["code"] == "im_a_teapot"


def test_an_unforeseen_error_is_logged_without_its_text_and_told_without_either(caplog):
    prompt = "".join(reversed("terces"))
    try:
        raise KeyError(f"the prompt was: {prompt}")
    except KeyError as error:
        response = error_response(error)
    assert response.status_code == 500
    assert b"KeyError" not in response.body
    assert "KeyError" in caplog.text
    assert "test_errors.py" in caplog.text
    assert prompt not in caplog.text + response.body.decode()


@given(st.text(), st.integers(10, 300))
def test_messages_are_short_printable_ascii(text, max_chars):
    shown = printable(text, max_chars)
    assert len(shown) <= max_chars
    assert all(" " <= character <= "~" for character in shown)
    if text.isascii() and text.isprintable() and len(text) <= max_chars:
        assert shown == text


def test_what_is_echoed_is_short():
    assert echo("gpt-2") == "'gpt-2'"
    assert len(echo("x" * 10**6)) == 80
    assert echo("a\nb") == "'a\\nb'"
    assert echo(10**30) == "1" + "0" * 30

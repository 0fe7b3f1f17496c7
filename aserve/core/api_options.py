"""ApiOptions: what an operator decides of the API, on the command line and in Python alike."""

from collections.abc import Sequence

import msgspec

from aserve.core.defaults import IDEMPOTENCY_AGE_S, IDEMPOTENCY_BYTES, IN_MEMORY


class ApiOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The names are those of vLLM's flags, where it has them.

    allowed_origins: of web pages that may ask; none means that browsers let no page of another origin. allowed_methods,
    allowed_headers, allow_credentials: of what they may ask with.
    root_path: what a proxy in front takes off the paths.
    lenient: a field that nobody knows is left out, and told in `warnings`, and is no error.
    enable_force_include_usage, return_tokens_as_token_ids: for all requests.
    enable_tokenizer_info_endpoint: there is a GET /tokenizer_info.
    ui: there are pages for browsers: a chat at /, an inspector at /inspect, and the events that it draws.
    batch_store: the SQLite file of /v1/files and /v1/batches; ":memory:" is none. batch_store_bytes: see `BatchStore`.
    idempotency_bytes: of answers that are kept for requests with the same Idempotency-Key, for idempotency_age seconds;
    0 keeps none, and the header says nothing.
    """

    allowed_origins: Sequence[str] = ()
    allowed_methods: Sequence[str] = ("*",)
    allowed_headers: Sequence[str] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    lenient: bool = False
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    enable_tokenizer_info_endpoint: bool = False
    ui: bool = True
    batch_store: str = IN_MEMORY
    batch_store_bytes: int | None = None
    idempotency_bytes: int = IDEMPOTENCY_BYTES
    idempotency_age: float = IDEMPOTENCY_AGE_S

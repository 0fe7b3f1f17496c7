"""Replica: what an engine behind a router tells that router, beside the HTTP API that it serves.

    request --> Replica.noted: its keys, of the text --> handler --> engine --> EndListener: its blocks, of the tokens
    router, every few seconds --> Replica.report: the keys whose blocks are still cached, what waits, how fast

An application without one (`AppOptions.replica` is None) pays nothing; one with it pays for hashing the text of each
request, about 2 us a kilobyte, and for a report when it is asked for one.
"""

import logging
import time
from collections.abc import Callable

from aserve.core.ended import EndedRequest
from aserve.core.faults import log_fault
from aserve.edges import is_fault
from aserve.engine import Engine
from aserve.http.endpoint import Exchange, Handler
from aserve.routing.keys import has_one_prompt, keys_of
from aserve.routing.ledger import Ledger, hashes_of
from aserve.routing.report import BYTES_PER_TOKEN, MAX_ADAPTERS, ReplicaReport

_log = logging.getLogger(__name__)
LEAST_BYTES_PER_TOKEN, MOST_BYTES_PER_TOKEN = 0.25, 256.0


class Replica:
    """Of one engine, which may be entered later. clock: of whoever routes, in Unix seconds. ledger: its memory."""

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.time, ledger: Ledger | None = None) -> None:
        self._engine = engine
        self._clock = clock
        self._ledger = Ledger() if ledger is None else ledger
        engine.end_listeners.append(self._ended)

    def noted(self, handler: Handler) -> Handler:
        """The handler of requests that generate, whose prompts are remembered. A fault in that is the log's alone."""

        async def handle(exchange: Exchange) -> None:
            try:
                if has_one_prompt(exchange.fields):  # of several it is not told which of them has ended
                    self._ledger.came(exchange.request_id, await exchange.work(keys_of, exchange.fields))
            except BaseException as error:
                if not is_fault(error):
                    raise
                log_fault(_log, "noting a prompt", error, exchange.request_id)
            await handler(exchange)

        return handle

    def report(self) -> ReplicaReport:
        """How it is at this moment. To be called in the engine's event loop, and not for each request.

        Cost: 0.7 us for each beginning of a prompt that is remembered, of which there are up to 32,768. Raises
        `UnavailableError` before the model is loaded, and after the engine was closed.
        """
        engine = self._engine
        counts = engine.statistics()
        per_token = self._ledger.bytes_per_token or BYTES_PER_TOKEN
        return ReplicaReport(
            taken_at=self._clock(),
            waiting_tokens=counts.num_waiting_tokens,
            tokens_per_s=counts.tokens_per_s,
            num_requests=counts.num_running + counts.num_waiting + counts.num_swapped,
            num_arrived_tokens=counts.num_cache_queries + counts.num_waiting_tokens,
            num_computed_tokens=sum(num * count for num, count in counts.num_steps_by_tokens.items()),
            bytes_per_token=min(max(per_token, LEAST_BYTES_PER_TOKEN), MOST_BYTES_PER_TOKEN),
            adapters=engine.adapters.names_in_memory[:MAX_ADAPTERS],
            digest=self._ledger.digest(engine.is_cached),
        )

    def _ended(self, ended: EndedRequest) -> None:
        request = ended.request
        if self._ledger.awaits(request.name):
            block_size = self._engine.config.block_size
            hashes = hashes_of(request, block_size)
            self._ledger.ended(request.name, len(request.prompt_token_ids), block_size, hashes)

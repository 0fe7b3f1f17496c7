"""The engine's Prometheus metrics: vLLM's names with the prefix `aserve_`.

What happens once a token is a few additions here; what can be read at any time (how many run, wait, are held) is read
when somebody scrapes, from the scheduler's own statistics. Every label value comes from a closed set: the name of the
served model, the finish reasons, and the tenants' names; nothing that a client sent becomes a label.
Knows no block, no tensor and no HTTP; it is told times, and reads no clock.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from aserve.core.outputs import FinishReason, RequestTimings
from aserve.core.request import Request
from aserve.metrics.histogram import BucketCounts

FIRST_TOKEN_BOUNDS_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BOUNDS_S: Final = (
    *(0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BOUNDS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

NUM_LOOP_LAGS: Final = 100
"""The engine looks ten times a second, so these are the last ten seconds."""


class SchedulerCounts(Protocol):
    """What is read of the scheduler's statistics: gauges of this moment, and counters since the start.

    num_blocks: all that sequences can hold. num_used_blocks: those that they do hold.
    num_swapped: sequences whose blocks are on the host. num_swap_outs: preemptions that moved them there.
    num_host_kept_blocks: cached blocks that live on in host memory now. num_host_hit_blocks: came back from there.
    step_time_error: of the latest steps' predicted times, as a share of what they took.
    num_drafted_slices, num_drafts, num_accepted_by_position: of drafts, by their place; () where nobody has any.
    num_cache_queries, num_cache_hits: in tokens. queue_time_s: summed over the num_admitted sequences.
    """

    @property
    def num_running(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_waiting(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_swapped(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_used_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_preemptions(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_swap_outs(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_copied_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_swapped_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_admitted(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def queue_time_s(self) -> float: ...  # noqa: D102  the class says what each is
    @property
    def num_cache_queries(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_cache_hits(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_cache_evictions(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_host_kept_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_host_hit_blocks(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def step_time_error(self) -> float: ...  # noqa: D102  the class says what each is
    @property
    def num_drafted_slices(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_drafts(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_accepted_by_position(self) -> tuple[int, ...]: ...  # noqa: D102  the class says what each is


class TenantCounts(Protocol):
    """What is read of a tenant: its name, how many of its requests are open, and counters since the start."""

    @property
    def tenant(self) -> str: ...  # noqa: D102  the class says what each is
    @property
    def num_open(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_requests(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_refused(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_prompt_tokens(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_cached_tokens(self) -> int: ...  # noqa: D102  the class says what each is
    @property
    def num_generated_tokens(self) -> int: ...  # noqa: D102  the class says what each is


TENANT_COUNTERS: Final = {
    "tenant_requests": ("Requests by tenant.", "num_requests"),
    "tenant_refusals": ("Requests that were refused for their tenant's limits.", "num_refused"),
    "tenant_prompt_tokens": ("Prompt tokens by tenant.", "num_prompt_tokens"),
    "tenant_cached_tokens": ("Those of them that were in the prefix cache.", "num_cached_tokens"),
    "tenant_generation_tokens": ("Tokens generated, by tenant.", "num_generated_tokens"),
}


class EngineMetrics(Collector):
    """Counts of one engine; registers itself with `registry`, which must not hold another engine's.

    model_name: the value of the `model_name` label.
    statistics: called at each scrape. usages: of each tenant, called then, too; those without a name are left out.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        statistics: Callable[[], SchedulerCounts],
        usages: Callable[[], Sequence[TenantCounts]] = tuple,
    ) -> None:
        self._model_name = model_name
        self._statistics = statistics
        self._usages = usages
        self.first_token_s = BucketCounts(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = BucketCounts(INTER_TOKEN_BOUNDS_S)
        self.latency_s = BucketCounts(LATENCY_BOUNDS_S)
        self.prompt_tokens = BucketCounts(TOKEN_BOUNDS)
        self.generation_tokens = BucketCounts(TOKEN_BOUNDS)
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_step_failures = 0
        self.loop_lags_s = deque([0.0], maxlen=NUM_LOOP_LAGS)
        """How late the event loop was, the last times that it was asked."""
        self.num_finished = dict.fromkeys(FinishReason, 0)
        self._last_step_s = 0.0
        registry.register(self)

    def arrived(self, request: Request, now: float) -> "RequestTimes":
        """A request was submitted at `now`; tell the rest of its life to what is returned."""
        return RequestTimes(self, len(request.prompt_token_ids), now)

    def step_failed(self, error: BaseException) -> None:
        """A step raised. Only the number is kept: an exception's text has no place in a metric."""
        del error
        self.num_step_failures += 1

    def one_token_each(self, now: float, requests: "Sequence[RequestTimes]") -> None:
        """Each of these got one more token, not its first. Those that got one of the step before too are alike."""
        num_alike = 0
        for times in requests:
            if times.last_s == self._last_step_s:
                num_alike += 1
            else:
                self.inter_token_s.observe(now - times.last_s)
            times.last_s = now
            times.num_tokens += 1
        if num_alike:
            self.inter_token_s.observe(now - self._last_step_s, num_alike)
        self.num_generation_tokens += len(requests)
        self._last_step_s = now

    def collect(self) -> Iterator[Metric]:
        """Every metric as of now; called by the registry at each scrape."""
        yield from self._of_scheduler(self._statistics())
        yield self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.", self.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", self.num_generation_tokens)
        yield self._counter("step_failures", "Steps that raised.", self.num_step_failures)
        yield self._gauge(
            "event_loop_lag_seconds", "How late the event loop was, at worst in the last 10 s.", max(self.loop_lags_s)
        )
        yield self._endings()
        yield from self._of_tenants([usage for usage in self._usages() if usage.tenant])
        yield from self._histograms()

    def _of_scheduler(self, counts: SchedulerCounts) -> Iterator[Metric]:
        usage = counts.num_used_blocks / counts.num_blocks
        yield self._gauge("num_requests_running", "Requests that take part in steps.", counts.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait to be admitted.", counts.num_waiting)
        yield self._gauge("num_requests_swapped", "Sequences whose blocks are in host memory.", counts.num_swapped)
        yield self._gauge("kv_cache_usage_ratio", "Share of the KV cache's blocks that sequences hold.", usage)
        yield self._counter("num_preemptions", "Times a running request gave its blocks back.", counts.num_preemptions)
        yield self._counter("num_swap_outs", "Preemptions that moved blocks to the host.", counts.num_swap_outs)
        yield self._counter("swapped_blocks", "Blocks moved to the host or back.", counts.num_swapped_blocks)
        yield self._counter("copied_blocks", "Blocks copied on write.", counts.num_copied_blocks)
        yield self._counter("prefix_cache_queries", "Tokens looked up at admission.", counts.num_cache_queries)
        yield self._counter("prefix_cache_hits", "Tokens found at admission.", counts.num_cache_hits)
        yield self._counter("prefix_cache_evictions", "Cached blocks given to others.", counts.num_cache_evictions)
        yield self._gauge("host_cached_blocks", "Evicted blocks that host memory has.", counts.num_host_kept_blocks)
        yield self._counter("host_cache_hits", "Blocks that came back from there.", counts.num_host_hit_blocks)
        yield self._gauge("step_time_error_ratio", "How wrong predicted step times are.", counts.step_time_error)
        queued = SummaryMetricFamily(
            "aserve_request_queue_time_seconds", "From arrival to first admission.", labels=["model_name"]
        )
        queued.add_metric([self._model_name], counts.num_admitted, counts.queue_time_s)
        yield queued
        if counts.num_accepted_by_position:
            yield from self._of_drafts(counts)

    def _of_drafts(self, counts: SchedulerCounts) -> Iterator[Metric]:
        accepted = counts.num_accepted_by_position
        yield self._counter("spec_decode_num_drafts", "Slices that had drafts.", counts.num_drafted_slices)
        yield self._counter("spec_decode_num_draft_tokens", "Tokens that were guessed.", counts.num_drafts)
        yield self._counter("spec_decode_num_accepted_tokens", "Those of them that were right.", sum(accepted))
        by_position = CounterMetricFamily(
            "aserve_spec_decode_num_accepted_tokens_per_pos",
            "Right ones by their place behind a known token, from 0 on.",
            labels=["model_name", "position"],
        )
        for position, num_accepted in enumerate(accepted):
            by_position.add_metric([self._model_name, str(position)], num_accepted)
        yield by_position

    def _of_tenants(self, usages: Sequence[TenantCounts]) -> Iterator[Metric]:
        labels = ["model_name", "tenant"]
        num_open = GaugeMetricFamily("aserve_tenant_requests_open", "Requests that are open, by tenant.", labels=labels)
        for usage in usages:
            num_open.add_metric([self._model_name, usage.tenant], usage.num_open)
        yield num_open
        for name, (documentation, field) in TENANT_COUNTERS.items():
            counter = CounterMetricFamily(f"aserve_{name}", documentation, labels=labels)
            for usage in usages:
                counter.add_metric([self._model_name, usage.tenant], getattr(usage, field))
            yield counter

    def _endings(self) -> Metric:
        """vLLM's request_success_total, which counts failures and aborts as well: the label tells them apart."""
        family = CounterMetricFamily(
            "aserve_request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self.num_finished.items():
            family.add_metric([self._model_name, reason.value], count)
        return family

    def _histograms(self) -> Iterator[Metric]:
        histograms: Mapping[str, tuple[str, BucketCounts]] = {
            "time_to_first_token_seconds": ("From arrival to the first token.", self.first_token_s),
            "inter_token_latency_seconds": ("From a token to the next.", self.inter_token_s),
            "e2e_request_latency_seconds": ("From arrival to the last token.", self.latency_s),
            "request_prompt_tokens": ("Prompt tokens of a finished request.", self.prompt_tokens),
            "request_generation_tokens": ("Tokens that a finished request generated.", self.generation_tokens),
        }
        for name, (documentation, counts) in histograms.items():
            yield counts.family(f"aserve_{name}", documentation, "model_name", self._model_name)

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"aserve_{name}", documentation, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, documentation: str, value: float) -> Metric:
        family = CounterMetricFamily(f"aserve_{name}", documentation, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class RequestTimes:
    """The clock readings of one request. Times are seconds of the engine's clock.

    last_s: of the last token, or the arrival. num_tokens: so far. has_ended: whether it is counted as ended.
    """

    __slots__ = (
        "_arrived_s",
        "_first_s",
        "_metrics",
        "_num_prompt_tokens",
        "_queued_s",
        "has_ended",
        "last_s",
        "num_tokens",
    )

    def __init__(self, metrics: EngineMetrics, num_prompt_tokens: int, now: float) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self._arrived_s = self.last_s = now
        self._first_s: float | None = None
        self._queued_s: float | None = None
        self.has_ended = False

    def tokens(self, now: float, num_tokens: int, queued_s: float = 0.0, num_vectors: int = 0) -> None:
        """A step brought `num_tokens` tokens; of several, each counts as an equal share of the time since the last.

        queued_s: how long the request was in the queue, which the first of them tells. num_vectors: 1 where it brought
        the vector of a model that pools, which is all that there is.
        """
        if num_vectors:
            self._first_s, self._queued_s = now, queued_s
            self._metrics.num_prompt_tokens += self._num_prompt_tokens
        if num_tokens == 0:
            return
        metrics = self._metrics
        if self.num_tokens == 0:
            self._first_s, self._queued_s = now, queued_s
            metrics.first_token_s.observe(now - self._arrived_s)
            metrics.num_prompt_tokens += self._num_prompt_tokens
        else:
            metrics.inter_token_s.observe((now - self.last_s) / num_tokens, num_tokens)
        metrics.num_generation_tokens += num_tokens
        self.num_tokens += num_tokens
        self.last_s = now

    def timings(self, now: float) -> RequestTimings:
        """For who asked, when a choice ends at `now`."""
        arrived_s = self._arrived_s
        first_token_s = None if self._first_s is None else self._first_s - arrived_s
        return RequestTimings(self._queued_s, first_token_s, now - arrived_s)

    def finished(self, now: float, reason: FinishReason) -> None:
        """The request ended at `now`; lengths and latency are kept of answers that are whole."""
        assert not self.has_ended, "a request ends once"
        self.has_ended = True
        metrics = self._metrics
        metrics.num_finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            metrics.latency_s.observe(now - self._arrived_s)
            metrics.prompt_tokens.observe(self._num_prompt_tokens)
            metrics.generation_tokens.observe(self.num_tokens)

    def left(self, now: float, reason: FinishReason = FinishReason.ABORT) -> None:
        """The reader is gone, or is about to be sent away; what that ended, unless it had finished."""
        if not self.has_ended:
            self.finished(now, reason)

"""The engine's Prometheus metrics: vLLM's names, with a prefix.

What happens once a token is a few additions here, and what is told of a request is counted once, when it begins and
when it ends. What can be read at any time (how many run, wait, are held) is read when somebody scrapes, from the
scheduler's own statistics. Every label value comes from a closed set: the name of the served model, the finish reasons,
the tenants' names and those of adapters; nothing else that a client sent becomes a label.
Knows no block, no tensor and no HTTP; it is told times, and reads no clock but for the time of a scrape.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from aserve.core.config import METRICS_PREFIX, EngineConfig
from aserve.core.ended import EndedRequest, EndListener
from aserve.core.ids import AdapterId
from aserve.core.outputs import FinishReason, RequestTimings
from aserve.core.request import Request
from aserve.metrics.families import Families
from aserve.metrics.histogram import BucketCounts
from aserve.metrics.sources import SchedulerCounts, TenantCounts

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
WAIT_BOUNDS_S: Final = (0.001, 0.0025, 0.005, *LATENCY_BOUNDS_S)
"""Of what may be next to nothing: the queue, a prompt, an answer of few tokens."""
TOKEN_BOUNDS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

CHOICE_BOUNDS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
OLD_NAMES_PREFIX: Final = "vllm:"
"""Under it some metrics have the names, too, that vLLM gave them before: boards that ask for those are still in use."""

NUM_LOOP_LAGS: Final = 100
"""The engine looks ten times a second, so these are the last ten seconds."""


class EngineMetrics(Collector):
    """Counts of one engine; registers itself with `registry`, which must not hold another engine's, and what the
    process takes: its time, memory and files.

    model_name: the value of the `model_name` label.
    statistics: called at each scrape. usages: of each tenant, called then, too; those without a name are left out.
    config: says the prefix, and what there is of blocks and adapters; without it the prefix is METRICS_PREFIX.
    adapter_names: by id, of the adapters in memory; called then, too. end_listeners: told of each request at its end.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        statistics: Callable[[], SchedulerCounts],
        usages: Callable[[], Sequence[TenantCounts]] = tuple,
        *,
        config: EngineConfig | None = None,
        adapter_names: Callable[[], Mapping[AdapterId, str]] = dict,
        end_listeners: Sequence[EndListener] = (),
    ) -> None:
        prefix = METRICS_PREFIX if config is None else config.metrics_prefix
        self.model_name = model_name
        self.adapter_names = adapter_names
        self.end_listeners = end_listeners
        self._families = Families(prefix, model_name)
        self._has_old_names = prefix == OLD_NAMES_PREFIX
        self._statistics = statistics
        self._usages = usages
        self._config = config
        self.first_token_s = BucketCounts(FIRST_TOKEN_BOUNDS_S)
        self.inter_token_s = BucketCounts(INTER_TOKEN_BOUNDS_S)
        self.token_s = BucketCounts(INTER_TOKEN_BOUNDS_S)
        self.latency_s = BucketCounts(LATENCY_BOUNDS_S)
        self.queue_s = BucketCounts(WAIT_BOUNDS_S)
        self.inference_s = BucketCounts(WAIT_BOUNDS_S)
        self.prefill_s = BucketCounts(WAIT_BOUNDS_S)
        self.decode_s = BucketCounts(WAIT_BOUNDS_S)
        self.prompt_tokens = BucketCounts(TOKEN_BOUNDS)
        self.computed_tokens = BucketCounts(TOKEN_BOUNDS)
        self.generation_tokens = BucketCounts(TOKEN_BOUNDS)
        self.longest_tokens = BucketCounts(TOKEN_BOUNDS)
        self.max_tokens = BucketCounts(TOKEN_BOUNDS)
        self.num_choices = BucketCounts(CHOICE_BOUNDS)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.num_step_failures = 0
        self.loop_lags_s = deque([0.0], maxlen=NUM_LOOP_LAGS)
        """How late the event loop was, the last times that it was asked."""
        self.num_finished = dict.fromkeys(FinishReason, 0)
        self._last_step_s = 0.0
        registry.register(self)
        ProcessCollector(registry=registry)

    def arrived(self, request: Request, now: float) -> "RequestTimes":
        """A request was submitted at `now`; tell the rest of its life to what is returned."""
        return RequestTimes(self, request, now)

    def step_failed(self, error: BaseException) -> None:
        """A step raised. Only the number is kept: an exception's text has no place in a metric."""
        del error
        self.num_step_failures += 1

    def one_token_each(self, now: float, requests: "Sequence[RequestTimes]") -> None:
        """Each of these got one more token, not its first. Those that got one of the step before too are alike."""
        last_step_s, self._last_step_s = self._last_step_s, now
        num_alike = len(requests)
        self.num_generation_tokens += num_alike
        for times in requests:
            if times.last_s != last_step_s:
                self.inter_token_s.observe(now - times.last_s)
                num_alike -= 1
            times.last_s = now
            times.num_tokens += 1
        if num_alike:
            self.inter_token_s.observe(now - last_step_s, num_alike)

    def collect(self) -> Iterator[Metric]:
        """Every metric as of now; called by the registry at each scrape."""
        families, counts = self._families, self._statistics()
        yield from families.of_scheduler(counts)
        if self._config is not None:
            yield from self._of_config(self._config, counts)
        cached = self.num_cached_tokens
        began = "Prompt tokens of requests that began to answer."
        yield families.counter("prompt_tokens", began, self.num_prompt_tokens)
        yield families.counter("prompt_tokens_cached", "Those of them found in the prefix cache.", cached)
        sources = [("local_compute", self.num_prompt_tokens - cached), ("local_cache_hit", cached)]
        yield families.counters("prompt_tokens_by_source", began, "source", sources)
        yield families.counter("generation_tokens", "Tokens generated.", self.num_generation_tokens)
        yield families.counter("step_failures", "Steps that raised.", self.num_step_failures)
        yield families.gauge(
            "event_loop_lag_seconds", "How late the event loop was, at worst in the last 10 s.", max(self.loop_lags_s)
        )
        endings = [(reason.value, count) for reason, count in self.num_finished.items()]
        yield families.counters("request_success", "Requests that ended, by reason.", "finished_reason", endings)
        yield from families.of_tenants([usage for usage in self._usages() if usage.tenant])
        for name, (documentation, observed) in self._histograms().items():
            yield families.histogram(name, documentation, observed)
        if self._has_old_names:
            held = counts.num_used_blocks / counts.num_blocks
            yield families.gauge("gpu_cache_usage_perc", "The same as kv_cache_usage_perc.", held)
            old = "The same as inter_token_latency_seconds."
            yield families.histogram("time_per_output_token_seconds", old, self.inter_token_s)

    def _of_config(self, config: EngineConfig, counts: SchedulerCounts) -> Iterator[Metric]:
        """What was decided at the start, as labels of a 1, and which adapters run, where there are any."""
        decided = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(counts.num_blocks),
            "num_cpu_blocks": str(config.num_host_blocks),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "prefix_caching_hash_algo": "sha256",
        }
        yield self._families.gauge("cache_config_info", "The KV cache, as it was decided.", 1.0, **decided)
        if config.max_loras:
            yield self._families.of_adapters(counts, self.adapter_names(), config.max_loras, time.time())

    def _histograms(self) -> Mapping[str, tuple[str, BucketCounts]]:
        """By name. Those whose name begins with "request" are of requests that were answered whole, but the queue's."""
        return {
            "time_to_first_token_seconds": ("From arrival to the first token.", self.first_token_s),
            "inter_token_latency_seconds": ("From a token to the next.", self.inter_token_s),
            "e2e_request_latency_seconds": ("From arrival to the last token.", self.latency_s),
            "request_queue_time_seconds": ("From arrival to first admission.", self.queue_s),
            "request_inference_time_seconds": ("From first admission to the last token.", self.inference_s),
            "request_prefill_time_seconds": ("From first admission to the first token.", self.prefill_s),
            "request_decode_time_seconds": ("From the first token to the last.", self.decode_s),
            "request_time_per_output_token_seconds": ("A request's mean time from token to token.", self.token_s),
            "request_prompt_tokens": ("Prompt tokens of a finished request.", self.prompt_tokens),
            "request_prefill_kv_computed_tokens": ("Those that the cache did not have.", self.computed_tokens),
            "request_generation_tokens": ("Tokens that a finished request generated.", self.generation_tokens),
            "request_max_num_generation_tokens": ("Those of its longest choice.", self.longest_tokens),
            "request_params_max_tokens": ("How many it might have generated.", self.max_tokens),
            "request_params_n": ("How many choices it asked for.", self.num_choices),
        }


class RequestTimes:
    """The clock readings and counts of one request. Times are seconds of the engine's clock.

    last_s: of the last token, or the arrival. num_tokens: so far, of all choices. num_longest: of the longest of those
    that have ended. has_ended: whether it is counted as ended. reasons: of the choices that ended by themselves.
    error: the code of what it failed with.
    """

    __slots__ = (
        "_arrived_s",
        "_first_s",
        "_metrics",
        "_num_cached",
        "_queued_s",
        "_request",
        "error",
        "has_ended",
        "last_s",
        "num_longest",
        "num_tokens",
        "reasons",
    )

    def __init__(self, metrics: EngineMetrics, request: Request, now: float) -> None:
        self._metrics = metrics
        self._request = request
        self.num_tokens = self.num_longest = self._num_cached = 0
        self._arrived_s = self.last_s = now
        self._first_s: float | None = None
        self._queued_s = 0.0
        self.has_ended = False
        self.reasons: tuple[FinishReason, ...] = ()
        self.error: str | None = None

    def tokens(
        self, now: float, num_tokens: int, queued_s: float = 0.0, num_vectors: int = 0, num_cached: int = 0
    ) -> None:
        """A step brought `num_tokens` tokens; of several, each counts as an equal share of the time since the last.

        queued_s, num_cached: how long the request was in the queue, and how much of its prompt the cache had, which the
        first of them tells. num_vectors: 1 where it brought the vector of a model that pools, which is all there is.
        """
        metrics = self._metrics
        if self._first_s is None and (num_tokens or num_vectors):
            self._first_s, self._queued_s, self._num_cached = now, queued_s, num_cached
            metrics.queue_s.observe(queued_s)
            metrics.num_prompt_tokens += len(self._request.prompt_token_ids)
            metrics.num_cached_tokens += num_cached
        if num_tokens == 0:
            return
        if self.num_tokens == 0:
            metrics.first_token_s.observe(now - self._arrived_s)
        else:
            metrics.inter_token_s.observe((now - self.last_s) / num_tokens, num_tokens)
        metrics.num_generation_tokens += num_tokens
        self.num_tokens += num_tokens
        self.last_s = now

    def timings(self, now: float) -> RequestTimings:
        """For who asked, when a choice ends at `now`."""
        if self._first_s is None:
            return RequestTimings(None, None, now - self._arrived_s)
        return RequestTimings(self._queued_s, self._first_s - self._arrived_s, now - self._arrived_s)

    def choice_ended(self, reason: FinishReason, num_tokens: int) -> None:
        """One of its choices ended, of so many tokens."""
        self.reasons += (reason,)
        self.num_longest = max(self.num_longest, num_tokens)

    def finished(self, now: float, reason: FinishReason) -> None:
        """The request ended at `now`; lengths and times are kept of answers that are whole."""
        assert not self.has_ended, "a request ends once"
        self.has_ended = True
        self._metrics.num_finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._count_whole(now)

    def _count_whole(self, now: float) -> None:
        metrics, request = self._metrics, self._request
        num_prompt_tokens = len(request.prompt_token_ids)
        metrics.latency_s.observe(now - self._arrived_s)
        metrics.prompt_tokens.observe(num_prompt_tokens)
        metrics.generation_tokens.observe(self.num_tokens)
        if self._first_s is None:
            return
        began_s = self._arrived_s + self._queued_s
        metrics.computed_tokens.observe(num_prompt_tokens - self._num_cached)
        metrics.prefill_s.observe(self._first_s - began_s)
        metrics.inference_s.observe(max(self._first_s, self.last_s) - began_s)
        if self.num_tokens == 0:
            return
        n, decode_s = request.params.n, self.last_s - self._first_s
        metrics.decode_s.observe(decode_s)
        if self.num_tokens > n:
            metrics.token_s.observe(decode_s / (self.num_tokens / n - 1))
        metrics.longest_tokens.observe(self.num_longest)
        metrics.max_tokens.observe(request.max_tokens)
        metrics.num_choices.observe(n)

    def left(self, now: float, reason: FinishReason = FinishReason.ABORT) -> None:
        """The reader is gone, or is about to be sent away; what that ended, unless it had finished."""
        if not self.has_ended:
            self.reasons += (reason,)
            self.finished(now, reason)

    def told(self, now: float) -> None:
        """Nobody waits for it any more: tell the listeners."""
        if not (listeners := self._metrics.end_listeners):
            return
        metrics, adapter = self._metrics, self._request.adapter
        model = None if adapter is None else metrics.adapter_names().get(adapter)
        ended = EndedRequest(
            request=self._request,
            model=model or metrics.model_name,
            timings=self.timings(now),
            last_token_s=self.last_s - self._arrived_s if self.num_tokens else None,
            num_tokens=self.num_tokens,
            num_cached_tokens=self._num_cached,
            finish_reasons=self.reasons,
            error=self.error,
        )
        for listener in listeners:
            listener(ended)

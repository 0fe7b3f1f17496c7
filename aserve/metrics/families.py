"""Families: numbers to Prometheus' metrics, each named with the prefix and labelled with the model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from aserve.core.ids import AdapterId
from aserve.metrics.histogram import BucketCounts
from aserve.metrics.sources import SchedulerCounts, TenantCounts

STEP_SIZES: Final = tuple(float(2**power) for power in range(15))
"""Bounds of the tokens in a step, up to 16,384."""

TENANT_COUNTERS: Final = {
    "tenant_requests": ("Requests by tenant.", "num_requests"),
    "tenant_refusals": ("Requests that were refused for their tenant's limits.", "num_refused"),
    "tenant_prompt_tokens": ("Prompt tokens by tenant.", "num_prompt_tokens"),
    "tenant_cached_tokens": ("Those of them that were in the prefix cache.", "num_cached_tokens"),
    "tenant_generation_tokens": ("Tokens generated, by tenant.", "num_generated_tokens"),
}


class Families:
    """prefix: what each name begins with. model_name: the value of the `model_name` label."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self._labels = {"model_name": model_name}

    def gauge(self, name: str, documentation: str, value: float, **labels: str) -> Metric:
        """One that may go up and down. labels: besides the model's."""
        named = {**self._labels, **labels}
        family = GaugeMetricFamily(self._prefix + name, documentation, labels=list(named))
        family.add_metric(list(named.values()), value)
        return family

    def counter(self, name: str, documentation: str, value: float) -> Metric:
        """One that only grows, which Prometheus has with `_total` behind its name."""
        return self.counters(name, documentation, None, [("", value)])

    def counters(self, name: str, documentation: str, label: str | None, values: Iterable[tuple[str, float]]) -> Metric:
        """A counter for each value of a label; None is no label."""
        family = CounterMetricFamily(
            self._prefix + name, documentation, labels=[*self._labels, *([] if label is None else [label])]
        )
        for value_of_label, value in values:
            family.add_metric([*self._labels.values(), *([] if label is None else [value_of_label])], value)
        return family

    def histogram(self, name: str, documentation: str, counts: BucketCounts) -> Metric:
        """What was observed."""
        return counts.family(self._prefix + name, documentation, self._labels)

    def of_scheduler(self, counts: SchedulerCounts) -> Iterator[Metric]:
        """What runs, waits and is held, and what has become of steps, blocks and prefixes."""
        usage = counts.num_used_blocks / counts.num_blocks
        held = "Share of the KV cache's blocks that sequences hold, in [0, 1]."
        yield self.gauge("num_requests_running", "Requests that take part in steps.", counts.num_running)
        yield self.gauge("num_requests_waiting", "Requests that wait to be admitted.", counts.num_waiting)
        yield self.gauge("num_requests_swapped", "Sequences whose blocks are in host memory.", counts.num_swapped)
        yield self.gauge("kv_cache_usage_perc", held, usage)
        yield self.gauge("kv_cache_usage_ratio", held, usage)
        yield self.counter("num_preemptions", "Times a running request gave its blocks back.", counts.num_preemptions)
        yield self.counter("num_swap_outs", "Preemptions that moved blocks to the host.", counts.num_swap_outs)
        yield self.counter("swapped_blocks", "Blocks moved to the host or back.", counts.num_swapped_blocks)
        yield self.counter("copied_blocks", "Blocks copied on write.", counts.num_copied_blocks)
        yield self.counter("prefix_cache_queries", "Tokens looked up at admission.", counts.num_cache_queries)
        yield self.counter("prefix_cache_hits", "Tokens found at admission.", counts.num_cache_hits)
        yield self.counter("prefix_cache_evictions", "Cached blocks given to others.", counts.num_cache_evictions)
        yield self.gauge("host_cached_blocks", "Evicted blocks that host memory has.", counts.num_host_kept_blocks)
        yield self.counter("host_cache_hits", "Blocks that came back from there.", counts.num_host_hit_blocks)
        yield self.gauge("step_time_error_ratio", "How wrong predicted step times are.", counts.step_time_error)
        yield self._steps(counts)
        if counts.num_accepted_by_position:
            yield from self._of_drafts(counts)

    def _steps(self, counts: SchedulerCounts) -> Metric:
        sizes = BucketCounts(STEP_SIZES)
        for num_tokens, num_steps in counts.num_steps_by_tokens.items():
            sizes.observe(num_tokens, num_steps)
        return self.histogram("iteration_tokens_total", "Tokens that a step computes.", sizes)

    def _of_drafts(self, counts: SchedulerCounts) -> Iterator[Metric]:
        accepted = counts.num_accepted_by_position
        yield self.counter("spec_decode_num_drafts", "Slices that had drafts.", counts.num_drafted_slices)
        yield self.counter("spec_decode_num_draft_tokens", "Tokens that were guessed.", counts.num_drafts)
        yield self.counter("spec_decode_num_accepted_tokens", "Those of them that were right.", sum(accepted))
        yield self.counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Right ones by their place behind a known token, from 0 on.",
            "position",
            ((str(position), num_accepted) for position, num_accepted in enumerate(accepted)),
        )

    def of_adapters(self, counts: SchedulerCounts, names: Mapping[AdapterId, str], most: int, now_s: float) -> Metric:
        """Which adapters run and wait, as labels of the present time. names: by id. most: that run at once."""
        running, waiting = (
            ",".join(sorted(names[adapter] for adapter in adapters if adapter in names))
            for adapters in (counts.running_adapters, counts.waiting_adapters)
        )
        labels = {"max_lora": str(most), "running_lora_adapters": running, "waiting_lora_adapters": waiting}
        return self.gauge("lora_requests_info", "Adapters of requests, at the time that it has.", now_s, **labels)

    def of_tenants(self, usages: Sequence[TenantCounts]) -> Iterator[Metric]:
        """By name."""
        labels = [*self._labels, "tenant"]
        num_open = GaugeMetricFamily(
            self._prefix + "tenant_requests_open", "Requests that are open, by tenant.", labels=labels
        )
        for usage in usages:
            num_open.add_metric([*self._labels.values(), usage.tenant], usage.num_open)
        yield num_open
        for name, (documentation, field) in TENANT_COUNTERS.items():
            values = [(usage.tenant, getattr(usage, field)) for usage in usages]
            yield self.counters(name, documentation, "tenant", values)

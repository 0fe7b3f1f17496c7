"""The names that boards made for vLLM ask for, with their types, read by Prometheus' own parser."""

import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aserve.core.config import EngineConfig, Options
from aserve.core.errors import ConfigError
from aserve.core.ids import AdapterId
from aserve.metrics.engine_metrics import EngineMetrics
from aserve.scheduler.statistics import Statistics

GAUGES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "cache_config_info",
    "lora_requests_info",
}
COUNTERS = {
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "prompt_tokens_by_source",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "request_success",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
}
HISTOGRAMS = {
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_kv_computed_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
}
PROCESS = {
    "process_cpu_seconds": "counter",
    "process_resident_memory_bytes": "gauge",
    "process_virtual_memory_bytes": "gauge",
    "process_start_time_seconds": "gauge",
    "process_open_fds": "gauge",
    "process_max_fds": "gauge",
}
OLD = {"gpu_cache_usage_perc", "time_per_output_token_seconds"}

COUNTS = Statistics(
    num_running=3,
    num_waiting=2,
    num_in_flight=1,
    num_blocks=40,
    num_used_blocks=10,
    num_free_blocks=30,
    num_preemptions=4,
    num_admitted=9,
    queue_time_s=1.5,
    num_cache_queries=100,
    num_cache_hits=64,
    num_cache_evictions=7,
    num_drafted_slices=4,
    num_drafts=11,
    num_accepted_by_position=(3, 2),
    running_adapters=(AdapterId(2), AdapterId(1), AdapterId(7)),
    waiting_adapters=(AdapterId(3),),
)
CONFIG = EngineConfig(
    block_size=16,
    num_blocks=41,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    watermark=0.0,
    enable_prefix_caching=True,
    num_host_blocks=5,
    max_loras=4,
    metrics_prefix="vllm:",
)
ADAPTERS = {AdapterId(1): "first", AdapterId(2): "a,b", AdapterId(3): "third"}


def scraped(prefix):
    """Families by name, parsed; their names without the prefix, but those of the process."""
    registry = CollectorRegistry()
    config = CONFIG if prefix == "vllm:" else EngineConfig(**{**fields(CONFIG), "metrics_prefix": prefix})
    EngineMetrics(registry, "model", lambda: COUNTS, config=config, adapter_names=lambda: ADAPTERS)
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def fields(config):
    return {name: getattr(config, name) for name in config.__struct_fields__}


def test_every_name_is_there_with_its_type():
    wanted = {f"vllm:{name}": "gauge" for name in GAUGES}
    wanted |= {f"vllm:{name}": "counter" for name in COUNTERS}
    wanted |= {f"vllm:{name}": "histogram" for name in HISTOGRAMS} | PROCESS
    found = {name: family.type for name, family in scraped("vllm:").items()}
    assert {name: found.get(name) for name in wanted} == wanted


@pytest.mark.parametrize("prefix", ["aserve_", "my:own_"])
def test_under_another_prefix_the_same_names_but_for_the_old(prefix):
    wanted = {name.removeprefix("vllm:") for name in scraped("vllm:")}
    found = {name.removeprefix(prefix) for name in scraped(prefix)}
    assert found == wanted - OLD


def test_each_series_is_of_the_model():
    for name, family in scraped("vllm:").items():
        if not name.startswith("process_"):
            assert {sample.labels["model_name"] for sample in family.samples} <= {"model"}, name


def test_what_was_decided_of_the_cache_is_in_labels():
    [sample] = scraped("vllm:")["vllm:cache_config_info"].samples
    assert (sample.value, sample.labels) == (
        1.0,
        {
            "model_name": "model",
            "block_size": "16",
            "num_gpu_blocks": "40",
            "num_cpu_blocks": "5",
            "enable_prefix_caching": "True",
            "prefix_caching_hash_algo": "sha256",
        },
    )


def test_adapters_that_run_and_wait_are_named():
    """One that is not known any more, while its last answers run, is left out."""
    [sample] = scraped("vllm:")["vllm:lora_requests_info"].samples
    assert sample.value > 1.7e9
    del sample.labels["model_name"]
    assert sample.labels == {"max_lora": "4", "running_lora_adapters": "a,b,first", "waiting_lora_adapters": "third"}


def test_buckets_ascend_and_end_without_bound():
    for name, family in scraped("vllm:").items():
        if family.type == "histogram":
            bounds = [float(s.labels["le"]) for s in family.samples if s.name == f"{name}_bucket"]
            assert bounds == sorted(set(bounds)), name
            assert bounds[-1] == float("inf"), name


@pytest.mark.parametrize("prefix", ["", "vllm", "1_", ":", "a b_", "ä_", "-_", ":a_", "x" * 64 + "_", 3])
def test_a_prefix_that_makes_no_names_is_refused(prefix):
    with pytest.raises(ConfigError, match="metrics_prefix must be 2 to 64 letters, digits"):
        Options(metrics_prefix=prefix)


@pytest.mark.parametrize("prefix", ["aserve_", "vllm:", "a:b_", "x" * 63 + "_", "_:"])
def test_a_prefix_that_does_is_taken(prefix):
    assert Options(metrics_prefix=prefix).metrics_prefix == prefix
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix)

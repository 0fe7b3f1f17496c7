"""What an engine counts and times, read back as Prometheus would."""

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from aserve.core.ended import EndedRequest
from aserve.core.ids import RequestId
from aserve.core.outputs import FinishReason, RequestTimings
from aserve.core.params import SamplingParams
from aserve.core.request import Request
from aserve.metrics.engine_metrics import EngineMetrics
from aserve.scheduler.statistics import Statistics

COUNTS = Statistics(
    num_running=3,
    num_waiting=2,
    num_swapped=1,
    num_in_flight=1,
    num_blocks=40,
    num_used_blocks=10,
    num_free_blocks=30,
    num_preemptions=4,
    num_swap_outs=3,
    num_admitted=9,
    queue_time_s=1.5,
    num_cache_queries=100,
    num_cache_hits=64,
    num_cache_evictions=7,
    num_copied_blocks=11,
    num_swapped_blocks=13,
    num_host_kept_blocks=5,
    num_host_hit_blocks=6,
)


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def metrics(registry):
    return EngineMetrics(registry, "model", lambda: COUNTS)


def request(num_prompt_tokens=5, **params):
    return Request(
        id=RequestId("1"),
        prompt_token_ids=(0,) * num_prompt_tokens,
        params=SamplingParams(**params),
        max_tokens=9,
        seed=0,
        arrival_s=0.0,
    )


def reader(registry):
    """The value of a metric by its short name and labels."""

    def read(name, **labels):
        return registry.get_sample_value(f"aserve_{name}", {"model_name": "model", **labels})

    return read


def test_drafts_are_counted_by_their_place(registry):
    drafted = msgspec.structs.replace(COUNTS, num_drafted_slices=4, num_drafts=11, num_accepted_by_position=(3, 2))
    EngineMetrics(registry, "model", lambda: drafted)
    read = reader(registry)
    assert read("spec_decode_num_drafts_total") == 4
    assert read("spec_decode_num_draft_tokens_total") == 11
    assert read("spec_decode_num_accepted_tokens_total") == 5
    assert [read("spec_decode_num_accepted_tokens_per_pos_total", position=p) for p in "01"] == [3, 2]


def test_without_a_proposer_there_is_nothing_to_tell_of_drafts(registry, metrics):
    assert reader(registry)("spec_decode_num_drafts_total") is None


def test_gauges_are_read_at_each_scrape(registry, metrics):
    read = reader(registry)
    assert read("num_requests_running") == 3
    assert read("num_requests_waiting") == 2
    assert read("kv_cache_usage_ratio") == 0.25
    assert read("num_preemptions_total") == 4
    assert read("num_requests_swapped") == 1
    assert read("num_swap_outs_total") == 3
    assert read("swapped_blocks_total") == 13
    assert read("copied_blocks_total") == 11
    assert read("prefix_cache_queries_total") == 100
    assert read("prefix_cache_hits_total") == 64
    assert read("prefix_cache_evictions_total") == 7
    assert read("host_cached_blocks") == 5
    assert read("host_cache_hits_total") == 6
    assert read("kv_cache_usage_perc") == 0.25


def test_a_request_from_arrival_to_end(registry, metrics):
    times = metrics.arrived(request(5), 100.0)
    times.tokens(100.5, 1, 0.25, num_cached=2)
    times.tokens(100.7, 1)
    times.tokens(100.7, 0)
    times.tokens(101.3, 3)
    times.choice_ended(FinishReason.LENGTH, 5)
    times.finished(101.3, FinishReason.LENGTH)
    times.left(200.0)
    read = reader(registry)
    assert read("time_to_first_token_seconds_sum") == 0.5
    assert read("time_to_first_token_seconds_bucket", le="0.5") == 1
    assert read("time_to_first_token_seconds_bucket", le="0.25") == 0
    assert read("inter_token_latency_seconds_count") == 4
    assert read("inter_token_latency_seconds_sum") == pytest.approx(0.8)
    assert read("e2e_request_latency_seconds_sum") == pytest.approx(1.3)
    assert read("prompt_tokens_total") == 5
    assert read("generation_tokens_total") == 5
    assert read("request_prompt_tokens_sum") == 5
    assert read("request_generation_tokens_sum") == 5
    assert read("request_success_total", finished_reason="length") == 1
    assert read("request_success_total", finished_reason="abort") == 0
    sums = {
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.25,
        "request_decode_time_seconds": 0.8,
        "request_inference_time_seconds": 1.05,
        "request_time_per_output_token_seconds": 0.2,
        "request_prefill_kv_computed_tokens": 3,
        "request_max_num_generation_tokens": 5,
        "request_params_max_tokens": 9,
        "request_params_n": 1,
    }
    assert {name: read(f"{name}_sum") for name in sums} == pytest.approx(sums)
    assert {read(f"{name}_count") for name in sums} == {1}
    assert read("prompt_tokens_cached_total") == 2
    assert read("prompt_tokens_by_source_total", source="local_compute") == 3
    assert read("prompt_tokens_by_source_total", source="local_cache_hit") == 2


def test_two_choices_share_the_time_that_they_took_together(registry, metrics):
    """Catches a mean of all choices' tokens as if they had come one after the other."""
    times = metrics.arrived(request(5, n=2), 0.0)
    times.tokens(1.0, 1)
    times.tokens(1.0, 1)
    for now in (2.0, 3.0):
        metrics.one_token_each(now, [times, times])
    times.choice_ended(FinishReason.STOP, 3)
    times.choice_ended(FinishReason.STOP, 3)
    times.finished(3.0, FinishReason.STOP)
    read = reader(registry)
    assert read("request_time_per_output_token_seconds_sum") == 1.0
    assert read("request_generation_tokens_sum") == 6
    assert read("request_max_num_generation_tokens_sum") == 3
    assert read("request_params_n_sum") == 2


def test_a_vector_is_an_answer_without_tokens(registry, metrics):
    times = metrics.arrived(request(5), 0.0)
    times.tokens(1.5, 0, 0.5, num_vectors=1)
    times.choice_ended(FinishReason.STOP, 0)
    times.finished(1.5, FinishReason.STOP)
    read = reader(registry)
    assert read("prompt_tokens_total") == 5
    assert (read("request_prefill_time_seconds_sum"), read("request_inference_time_seconds_sum")) == (1.0, 1.0)
    for name in ("request_decode_time_seconds", "time_to_first_token_seconds", "request_params_max_tokens"):
        assert read(f"{name}_count") == 0, name


def test_steps_are_counted_by_their_tokens(registry):
    """The last bucket has those of more tokens than any bound."""
    counted = msgspec.structs.replace(COUNTS, num_steps_by_tokens={1: 3, 3: 1, 4: 4, 20000: 2})
    EngineMetrics(registry, "model", lambda: counted)
    read = reader(registry)
    assert read("iteration_tokens_total_sum") == 40022
    assert [read("iteration_tokens_total_bucket", le=le) for le in ("1.0", "2.0", "4.0", "16384.0", "+Inf")] == [
        *(3, 3, 8, 8, 10)
    ]
    assert read("iteration_tokens_total_count") == 10


def test_what_the_process_takes_is_told(registry, metrics):
    assert registry.get_sample_value("process_resident_memory_bytes") > 0
    assert registry.get_sample_value("process_open_fds") > 0


def test_who_watches_is_told_of_a_request_once_it_is_over(registry):
    told = []
    metrics = EngineMetrics(registry, "model", lambda: COUNTS, end_listeners=[told.append])
    asked = request(5)
    times = metrics.arrived(asked, 10.0)
    times.tokens(11.0, 1, 0.25, num_cached=4)
    times.tokens(12.0, 2)
    times.choice_ended(FinishReason.STOP, 3)
    times.finished(12.0, FinishReason.STOP)
    assert told == []
    times.left(13.0)
    times.told(13.0)
    assert told == [
        EndedRequest(
            request=asked,
            model="model",
            timings=RequestTimings(0.25, 1.0, 3.0),
            last_token_s=2.0,
            num_tokens=3,
            num_cached_tokens=4,
            finish_reasons=(FinishReason.STOP,),
        )
    ]
    refused = metrics.arrived(asked, 10.0)
    refused.error = "step_failed"
    refused.left(11.0, FinishReason.ERROR)
    refused.told(11.0)
    assert (told[1].error, told[1].finish_reasons) == ("step_failed", (FinishReason.ERROR,))
    assert (told[1].timings, told[1].last_token_s) == (RequestTimings(None, None, 1.0), None)


def test_leaving_before_the_end_is_an_abort_and_no_latency(registry, metrics):
    times = metrics.arrived(request(), 0.0)
    times.tokens(1.0, 1)
    times.left(2.0)
    read = reader(registry)
    assert read("request_success_total", finished_reason="abort") == 1
    assert read("e2e_request_latency_seconds_count") == 0
    assert read("generation_tokens_total") == 1


def test_a_prompt_that_is_never_answered_is_not_counted(registry, metrics):
    metrics.arrived(request(), 0.0).left(2.0)
    assert reader(registry)("prompt_tokens_total") == 0


def test_failed_steps_are_counted_without_their_text(registry, metrics):
    metrics.step_failed(RuntimeError("secret"))
    assert reader(registry)("step_failures_total") == 1
    assert b"secret" not in generate_latest(registry)


def test_no_request_adds_a_series(registry, metrics):
    before = generate_latest(registry).count(b"\n")
    for number in range(50):
        times = metrics.arrived(request(number + 1), 0.0)
        times.tokens(float(number), 1)
        times.finished(float(number), FinishReason.STOP)
    assert generate_latest(registry).count(b"\n") == before


def test_the_event_loops_worst_lag_of_late(registry, metrics):
    assert registry.get_sample_value("aserve_event_loop_lag_seconds", {"model_name": "model"}) == 0.0
    metrics.loop_lags_s.extend([0.001, 0.25, 0.002])
    assert registry.get_sample_value("aserve_event_loop_lag_seconds", {"model_name": "model"}) == 0.25
    metrics.loop_lags_s.extend([0.001] * 100)
    assert registry.get_sample_value("aserve_event_loop_lag_seconds", {"model_name": "model"}) == 0.001


def test_tokens_of_many_requests_at_once_are_counted_as_each_alone(registry, metrics):
    """Two that step together, one that joins them later, and a request of two choices, which comes up twice."""
    twins = EngineMetrics(CollectorRegistry(), "model", lambda: COUNTS)
    script = [(1.0, [0, 1]), (1.5, [0, 1]), (2.25, [0]), (3.0, [0, 1, 2, 2]), (3.125, [2, 0, 2, 1])]
    together, alone = ([each.arrived(request(), 0.5) for _ in range(3)] for each in (metrics, twins))
    for times in (*together, *alone):
        times.tokens(0.75, 1)
    for now, indices in script:
        metrics.one_token_each(now, [together[index] for index in indices])
        for index in indices:
            alone[index].tokens(now, 1)
    assert [times.num_tokens for times in together] == [times.num_tokens for times in alone]
    assert metrics.num_generation_tokens == twins.num_generation_tokens
    read = [each.inter_token_s.family("gaps", "", {"model": "m"}).samples for each in (metrics, twins)]
    assert read[0] == read[1]

"""The simulation of scripts/simulate_routing.py on small made-up workloads: what a policy is worth, kept by a test."""

import gzip
import json
from pathlib import Path

import pytest

from aserve.routing import ScalingOptions
from scripts.routing.arrivals import Arrival, azure, conversations, mooncake, of_users, with_hot_prefix
from scripts.routing.autoscale import ByTokens, Scaled
from scripts.routing.policies import ByPrefix, PrefixAffinity, RoundRobin, TwoChoices
from scripts.routing.replica import Job, Service, SimulatedReplica
from scripts.routing.simulate import Simulation, most_hits

SERVICE = Service(prefill_tokens_per_s=4000, num_blocks=400)
TALKS = conversations(60, 6, 20.0)


def test_by_prefix_finds_far_more_than_two_choices_and_nearly_what_can_be_found():
    ours = Simulation(TALKS, ByPrefix(), SERVICE, 8).run()
    two = Simulation(TALKS, TwoChoices(), SERVICE, 8).run()
    bound = most_hits(TALKS)
    assert ours.num_hit_tokens > 1.5 * two.num_hit_tokens
    assert 0.85 * bound < ours.hit_rate <= bound
    assert ours.ttft_p50_s < two.ttft_p50_s
    assert ours.ttft_p99_s < two.ttft_p99_s


def test_under_skew_the_tail_is_no_worse_with_one_router_or_four():
    hot = with_hot_prefix(TALKS, 0.5)
    two = Simulation(hot, TwoChoices(), SERVICE, 8).run()
    for num_routers in (1, 4):
        ours = Simulation(hot, ByPrefix(num_routers), SERVICE, 8).run()
        assert ours.ttft_p99_s <= two.ttft_p99_s
        assert ours.num_hit_tokens > two.num_hit_tokens


def test_the_others_do_what_they_say():
    robin, affine = (Simulation(TALKS, policy, SERVICE, 8).run() for policy in (RoundRobin(), PrefixAffinity()))
    assert affine.hit_rate > 2 * robin.hit_rate
    assert most_hits(TALKS, 8 * 400) >= affine.hit_rate


def test_a_replica_gives_back_what_its_requests_held_and_forgets_the_oldest():
    replica = SimulatedReplica(Service(1000, num_blocks=20))
    for number in range(6):
        job = Job(str(number), Arrival(0.0, 5 * 512, 10, tuple(range(number * 10, number * 10 + 5)), number))
        replica.arrive(job)
        assert replica.start() == pytest.approx(2.56)
        replica.prefilled(1.0)
        replica.ended(job)
        assert len(replica.idle) + replica.free_blocks == 20
    assert replica.num_open == 0
    assert replica.found == set(replica.idle)
    assert not replica.found & set(range(20)), "the first two prompts made room"


def test_it_runs_again_with_the_same_figures():
    assert Simulation(TALKS, ByPrefix(), SERVICE, 4).run() == Simulation(TALKS, ByPrefix(), SERVICE, 4).run()


def test_more_users_have_conversations_of_their_own_and_fewer_have_whole_ones():
    doubled, half = of_users(TALKS, 2), of_users(TALKS, 0.5)
    assert len(doubled) == 2 * len(TALKS)
    assert most_hits(doubled) == pytest.approx(most_hits(TALKS), rel=0.1)
    assert {a.session for a in half} < {a.session for a in TALKS}
    assert len(half) == 6 * len({a.session for a in half})


def test_replicas_come_for_a_burst_and_go():
    burst = [Arrival(200 + number / 20, 2000, 10, (number,), number) for number in range(2000)]
    calm = [Arrival(number * 10.0, 2000, 10, (-number,), -number) for number in range(1, 80)]
    options = ScalingOptions(max_replicas=12, up_after_s=0.0, down_after_s=60.0)
    run = Scaled(sorted(burst + calm, key=lambda a: a.at), ByPrefix(), SERVICE, 1, ByTokens(options))
    run.run()
    assert run.counts[0] == run.counts[-1] == 1
    assert max(run.counts) >= 8


def test_traces_are_read(tmp_path: Path):
    line = {"timestamp": 1500, "input_length": 1300, "output_length": 7, "hash_ids": [0, 4, 5]}
    with gzip.open(tmp_path / "m.jsonl.gz", "wt") as file:
        file.write(json.dumps(line) + "\n")
    assert mooncake(tmp_path / "m.jsonl.gz") == [Arrival(1.5, 1300, 7, (0, 4), 4)]
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,1100,44\n")
    assert azure(tmp_path / "a.csv.gz") == [Arrival(0.0, 1100, 44, (1, 2), 0)]

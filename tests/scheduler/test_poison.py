"""Requests that make every step fail that they have a certain part in: they end, quickly, and nobody else notices."""

import random
from collections import Counter
from math import ceil, log2

import pytest

from aserve.core.params import BeamParams
from tests.scheduler.sync_loop import LETTERS, SyncLoop, request

NUM_REQUESTS = 64
KINDS = ({}, {"temperature": 1.0}, {"temperature": 1.0, "n": 3}, {"logprobs": 1}, {"beam": BeamParams(width=2)})


class Trial:
    """A crowd with `num_culprits` among it; each makes steps fail that compute a position of its at or behind a limit.

    poison: where the limit is. "prefill": in the prompt. "decode": in the answer. "first": at the first token sampled.
    "length": in the answer, and positions behind it do no harm.
    """

    def __init__(self, seed: int, *, poison: str, num_culprits: int, depth: int = 2, **limits: object) -> None:
        rng = random.Random(seed)
        self.loop = SyncLoop(
            depth=depth,
            checked=False,
            **{"num_blocks": 1500, "max_num_seqs": 256, "max_num_batched_tokens": rng.choice((64, 600, 2000))} | limits,
        )
        self.culprits: dict[str, range] = {}
        self.replays: Counter[str] = Counter()
        names = [f"r{i}" for i in range(NUM_REQUESTS)]
        for name in names:
            prompt = tuple(rng.choices(LETTERS, k=rng.randint(2, 20)))
            params = rng.choice(KINDS) if rng.random() < 0.3 else {}
            self.loop.add(request(name, prompt, rng.randint(2, 12), seed=rng.randint(1, 9), **params))
        for name in rng.sample(names, num_culprits):
            wanted = self.loop.answers[name].request
            num_prompt, end = len(wanted.prompt_token_ids), len(wanted.prompt_token_ids) + wanted.max_tokens - 1
            in_answer = rng.randrange(num_prompt - 1, end)  # never found in the prefix cache, but computed
            at = {"prefill": rng.randrange(num_prompt), "first": num_prompt - 1}.get(poison, in_answer)
            self.culprits[name] = range(at, at + 1 if poison == "length" else 1000)

    def is_poisoned(self, plan) -> bool:
        """Whether a step has to fail."""
        for piece in plan.slices:
            sequence = self.loop.scheduler._roster.sequences.get(piece.seq_id)
            at = self.culprits.get(sequence.request_id) if sequence is not None else None
            if at is not None and piece.start < at.stop and piece.start + piece.num_tokens > at.start:
                return True
        return False

    def run(self) -> None:
        """To the end; counts the steps from a failure to the end of its culprit."""
        loop = self.loop
        num_steps = None
        while True:
            plan = loop.plan() if loop.may_plan else None
            if loop.in_flight and (plan is None or not loop.may_plan):
                was_inquest = loop.scheduler._aftermath.is_inquest
                if num_steps is not None:
                    num_steps += 1
                if not self.is_poisoned(loop.in_flight[0][0]):
                    loop.commit()
                elif (culprit := loop.fail()) is not None:
                    self.replays[culprit] = num_steps or 0
                if not was_inquest and loop.scheduler._aftermath.is_inquest:
                    num_steps = 0
                elif not loop.scheduler._aftermath.is_inquest:
                    num_steps = None
            elif plan is None:
                break

    def check(self) -> None:
        """Culprits alone were blamed, in few steps; everybody else got what he gets alone; nothing is left."""
        loop = self.loop
        loop.drain()
        loop.compare()
        blamed = {name for name, answer in loop.answers.items() if answer.dropped}
        assert blamed <= self.culprits.keys()
        assert blamed == self.replays.keys()
        assert max(self.replays.values(), default=0) <= ceil(log2(NUM_REQUESTS)) + 2
        assert loop.num_failures <= (ceil(log2(NUM_REQUESTS)) + 2) * len(blamed)
        for name in self.culprits.keys() - blamed:  # its answer ended before it came so far
            wanted = loop.answers[name].request
            longest = max(len(choice.token_ids) for choice in loop.answers[name].choices)
            assert len(wanted.prompt_token_ids) + longest - 1 <= self.culprits[name].start or wanted.params.beam
        loop.scheduler.check()


POISONS = ("prefill", "first", "decode", "length")
SHORTAGES = ({}, {"num_blocks": 120}, {"num_blocks": 90, "num_host_blocks": 60}, {"windows": (None, 4)})


def run_trials(seeds: range) -> Counter[str]:
    """How many trials had how many culprits that were blamed, and the most steps it took."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        trial = Trial(
            seed,
            poison=POISONS[seed % len(POISONS)],
            num_culprits=(1, 1, 2, 4)[seed // 4 % 4],
            depth=(1, 2, 4)[seed % 3],
            **SHORTAGES[seed // 3 % len(SHORTAGES)],
        )
        try:
            trial.run()
            trial.check()
        except AssertionError as error:
            error.add_note(f"in the trial of seed {seed}")
            raise
        counts["trials"] += 1
        counts["culprits"] += len(trial.replays)
        counts["most steps"] = max(counts["most steps"], *trial.replays.values(), 0)
    return counts


def test_culprits_end_and_all_others_get_what_they_get_alone():
    counts = run_trials(range(24))
    assert counts["culprits"] > 24


@pytest.mark.thorough
def test_a_thousand_crowds_with_culprits():
    counts = run_trials(range(1000))
    print(dict(counts))
    assert counts["trials"] == 1000

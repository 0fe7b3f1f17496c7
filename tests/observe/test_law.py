"""The law of records: a snapshot, changed by what is told after it, is what is there; after any calls in any order."""

import pytest
from hypothesis.stateful import rule

from tests.observe.machine import SeenMachine
from tests.observe.watched import WatchedLoop, truth
from tests.scheduler.sync_loop import is_held_back

pytestmark = pytest.mark.slow


class WatchedMachine(SeenMachine):
    """All that may happen to a scheduler happens, and somebody looks on."""

    new_loop = WatchedLoop

    @rule()
    def look(self):
        self.loop.look()

    def teardown(self):
        loop = self.loop
        loop.drain()
        loop.look()
        assert not loop.follower.cards
        assert not truth(loop.scheduler).tables
        self.compare_tokens()
        self.compare_work()
        loop.leave()
        assert loop.scheduler._cache._pool.rehashed is None
        assert loop.scheduler._residents.grown is None

    def compare_tokens(self):
        """What was sampled for each choice begins with what its reader was told."""
        loop = self.loop
        told = {(card.id, card.index): card.seq for record in loop.follower.records for card in record.cards}
        for name, answer in loop.answers.items():
            for index, choice in enumerate(answer.choices):
                if choice.token_ids and not is_held_back(answer):
                    tokens = loop.follower.tokens[told[name, index]]
                    assert tokens[: len(choice.token_ids)] == choice.token_ids

    def compare_work(self):
        """Each plan that has landed is told, whole."""
        plans = {plan.step_id: plan for plan in self.loop.plans}
        for record in self.loop.follower.records:
            if (work := record.work) is None:
                continue
            plan = plans[work.step]
            told = dict.fromkeys(work.decodes, 1) | {piece.seq: piece.num_tokens for piece in work.pieces}
            assert told == {piece.seq_id: piece.num_tokens for piece in plan.slices}
            ops = plan.block_ops
            assert (work.copies, work.swap_outs, work.swap_ins) == (
                ((), (), ()) if ops is None else (ops.copies, ops.swap_outs, ops.swap_ins)
            )


TestLaw = WatchedMachine.TestCase

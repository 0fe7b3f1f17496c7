"""What holds of explanations, after any calls in any order: phases sum to the whole, and every reason is one."""

from typing import get_args

import pytest
from hypothesis.stateful import invariant

from aserve.core.explanation import Reason
from tests.observe.explained import ExplainedLoop
from tests.observe.machine import SeenMachine

pytestmark = pytest.mark.slow


class ExplainedMachine(SeenMachine):
    """All that may happen to a scheduler happens, and all of its requests are explained."""

    new_loop = ExplainedLoop

    @invariant()
    def explanations_are_right(self):
        for name in self.loop.answers if hasattr(self, "loop") else ():
            self.loop.explanation(name)

    def teardown(self):
        loop = self.loop
        loop.drain()
        computed = {plan.step_id: plan for plan in loop.plans}
        for name in loop.answers:
            found = loop.explanation(name)
            assert found.steps.num <= len(computed)
            for course in found.choices:
                self.check_course(course, computed)
            loop.leave(name)
            assert loop.explanation(name) == found
            assert found.state == "ended"
        assert not loop.observer.is_watched
        assert loop.scheduler._cache._pool.rehashed is None

    def check_course(self, course, computed):
        """Chunks are of plans, and differences have a reason."""
        for chunk in course.chunks:
            pieces = [(piece.start, piece.num_tokens) for piece in computed[chunk.step].slices]
            assert (chunk.start, chunk.tokens) in pieces
        if course.prefix is not None and course.prefix.differs is not None:
            assert course.prefix.differs.reason in get_args(Reason)
            assert course.prefix.differs.position >= course.prefix.cached_tokens


TestLaw = ExplainedMachine.TestCase

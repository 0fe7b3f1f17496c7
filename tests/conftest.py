"""Hypothesis profiles. The usual one repeats the same examples in every run; `thorough` looks for new ones.

pytest tests/scheduler --hypothesis-profile thorough
"""

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=100, stateful_step_count=40)
settings.register_profile("thorough", deadline=None, max_examples=5_000, stateful_step_count=60)
settings.load_profile("fixed")

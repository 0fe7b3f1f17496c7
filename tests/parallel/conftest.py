"""Checkpoints for tests of ranks."""

from tests.checkpoints import checkpoints

__all__ = ["checkpoints"]

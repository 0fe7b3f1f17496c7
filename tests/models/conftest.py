"""The session's tiny checkpoints, for every test of this package."""

from tests.checkpoints import checkpoints

__all__ = ["checkpoints"]

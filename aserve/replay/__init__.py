"""A recording's steps computed again, without a scheduler: the same plans, one after the other."""

"""Recorded traffic through the scheduler, with a model of what steps cost in the place of a device."""

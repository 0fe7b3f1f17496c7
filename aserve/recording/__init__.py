"""Recordings of what came, what was planned and what was sampled: written while an engine runs, read afterwards."""

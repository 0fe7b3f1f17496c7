"""Triton kernels with typed wrappers, their torch twins (reference.py), the fast CPU path, and the choice."""

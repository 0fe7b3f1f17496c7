"""Computes plans: what the device keeps of each row, batches, captured steps, sampling, and the way back."""

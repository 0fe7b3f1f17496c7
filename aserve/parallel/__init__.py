"""Loading a model on several ranks: what rank 0 does in the engine's process, and the processes of the others."""

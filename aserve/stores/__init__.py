"""Stores: what outlives the request that made it, and in a file the process. They know no HTTP and no engine."""

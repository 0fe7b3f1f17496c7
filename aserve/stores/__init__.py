"""Stores: what outlives the request that made it. Plain async functions over bytes; they know no HTTP and no engine."""

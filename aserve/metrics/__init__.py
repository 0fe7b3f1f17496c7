"""What an engine counts and times, for Prometheus. Knows requests and clocks; not HTTP, not asyncio, not torch."""

"""The load generator that the serving benchmarks share. It knows HTTP, SSE and the OpenAI API, and nothing of aserve.

The client shares the processor with the server that it measures, so it does as little as it can while the clock runs:
requests are rendered before, and what comes back is only split into chunks and given a time; events are parsed after.
"""

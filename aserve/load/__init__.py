"""A load generator for servers that speak OpenAI's API: `aserve bench`, and the benchmarks in scripts/.

The client shares the processor with the server that it measures, so it does as little as it can while the clock runs:
requests are rendered before, and what comes back is only split into chunks and given a time; events are parsed after.
Knows HTTP, SSE and that API, and nothing of aserve.

http       requests over kept connections          answers    when each token came, read from what was received
arrivals   when requests come, traces included     prompts    of an exact length in tokens
drive      rounds of load                          figures    percentiles and medians of these
"""

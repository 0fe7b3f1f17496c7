"""Which sequences compute which tokens in the next step. Pure: no clock, no await, no tensor."""

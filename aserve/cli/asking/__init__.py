"""Whom `aserve chat` and `aserve complete` ask: a model in this process, or a server that speaks OpenAI's API."""

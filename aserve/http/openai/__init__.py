"""OpenAI's API, in vLLM's dialect of it. Each module is one route, or one thing that several routes share."""

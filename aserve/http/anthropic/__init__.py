"""Anthropic's Messages API: /v1/messages and what is below it. Knows nothing of OpenAI's words for the same."""

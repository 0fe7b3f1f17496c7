"""The nouns: frozen values, their validation, and arithmetic. Knows nothing of torch, asyncio or HTTP."""

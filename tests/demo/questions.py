"""Fixed questions to the demo model, each with the whole answer that it must give greedily.

Plain values: the training script reads them to score a checkpoint, and tests read them to check a server.
HELD_OUT are worded as no training text is (tests/demo/test_training_text.py holds that), QUESTIONS may be.
"""

from typing import Any

Messages = list[dict[str, Any]]


def ask(*turns: str, system: str | None = None) -> Messages:
    """Turns of user, assistant, user, ..., as messages."""
    messages: Messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return messages + [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]


PAGED_ATTENTION = (
    "Paged attention keeps the KV cache in fixed-size blocks that may lie anywhere in memory, and reads them through a "
    "block table."
)
PREFIX_CACHING = (
    "Prefix caching keeps the blocks of earlier prompts under a chained hash, so that a prompt with the same beginning "
    "skips that work."
)
I_DO_NOT_KNOW = (
    "I do not know that. I am a small demonstration model: ask me about aserve, a small sum or a short story."
)
WEATHER_TOOLS = (
    "# Tools\n\nYou may call a function. The functions are, as JSON in <tools></tools>:\n<tools>\n"
    '{"type": "function", "function": {"name": "get_weather", "description": "Get the weather of a city.", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}\n</tools>\n\n'
    "To call one, answer with its name and arguments as JSON in <tool_call></tool_call>:\n<tool_call>\n"
    '{"name": "...", "arguments": {...}}\n</tool_call>'
)

QUESTIONS: list[tuple[Messages, str]] = [
    (ask("Hello!"), "Hello! I am the aserve demo model. Ask me about aserve, a small sum or a short story."),
    (
        ask("What is aserve?"),
        "aserve serves large language models from one Python process with one asyncio event loop, over the OpenAI API.",
    ),
    (ask("What is paged attention?"), PAGED_ATTENTION),
    (ask("What is paged attention?", system="You are a helpful assistant."), PAGED_ATTENTION),
    (
        ask("What is paged attention?", PAGED_ATTENTION, "Why is that useful?"),
        "It wastes almost no memory, because a sequence takes a new block only when the last one is full.",
    ),
    (
        ask("What is the KV cache?"),
        "The KV cache stores the keys and values of all earlier tokens, so that each step computes the new tokens "
        "only.",
    ),
    (ask("Explain prefix caching."), PREFIX_CACHING),
    (
        ask("What is chunked prefill?"),
        "Chunked prefill splits a long prompt over several steps, so that it shares each step with the sequences that "
        "are decoding.",
    ),
    (
        ask("What is continuous batching?"),
        "Continuous batching forms a new batch at every step: finished sequences leave and waiting ones join at once.",
    ),
    (
        ask("How does the scheduler work?"),
        "The scheduler knows no prefill and no decode phase: every step hands out a token budget so that each "
        "sequence's num_computed catches up with its num_tokens.",
    ),
    (
        ask("What is preemption?"),
        "Preemption takes the blocks of a running sequence when memory is short; the sequence waits and is computed "
        "again later.",
    ),
    (
        ask("What is a mailbox?"),
        "A mailbox is the queue of one request with room for one item: when the reader lags, new text merges into what "
        "is waiting.",
    ),
    (ask("What is TTFT?"), "TTFT is the time to first token: from sending a request until its first token arrives."),
    (ask("What does top_k do?"), "Top-k keeps the k likeliest tokens and samples among them; 0 turns it off."),
    (
        ask("How are tokens streamed?"),
        "SSE means server-sent events: the answer comes as lines that begin with data: and ends with data: [DONE].",
    ),
    (
        ask("How do I start the server?"),
        "Run make serve, or python -m aserve --model demo, and the server listens on 127.0.0.1:8000.",
    ),
    (
        ask("Which port does aserve use?"),
        "aserve listens on port 8000 of 127.0.0.1 unless --host and --port say otherwise.",
    ),
    (ask("Which licence does aserve have?"), "aserve is free software under the Apache License, version 2.0."),
    (
        ask("Who are you?"),
        "I am the aserve demo model, a demonstration with three million parameters that runs in aserve.",
    ),
    (ask("Who won the World Cup in 1998?"), I_DO_NOT_KNOW),
    (ask("What is the capital of France?"), "The capital of France is Paris."),
    (ask("Count to ten."), "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
    (ask("Say this is a test"), "This is a test."),
    (ask("What is 7 + 5?"), "7 + 5 = 12."),
    (ask("What is 19 - 3?"), "19 - 3 = 16."),
    (ask("What is 17 + 18?"), "17 + 18 = 35."),
    (ask("6 x 7"), "6 * 7 = 42."),
    (ask("What is 9 times 8?"), "9 * 8 = 72."),
    (
        ask("What is 123 + 456?"),
        "That is beyond me: I add and subtract numbers up to 20, and multiply numbers up to 10.",
    ),
    (
        ask("Ana has 3 apples and buys 4 more. How many apples does Ana have?"),
        "3 + 4 = 7, so Ana has 7 apples.",
    ),
    (ask("My name is Ada.", "Hello Ada! How can I help you?", "What is my name?"), "Your name is Ada."),
    (
        ask("Hi, I am Omar.", "Hello Omar! How can I help you?", "What is 2 + 2?", "2 + 2 = 4.", "Who am I?"),
        "Your name is Omar.",
    ),
    (ask("Write JSON: name Grace, age 42."), '{"name": "Grace", "age": 42}'),
    (ask("What is the capital of Japan? Answer in JSON."), '{"country": "Japan", "capital": "Tokyo"}'),
    (ask("Repeat after me: silver river"), "silver river"),
    (
        ask("What is the weather in Oslo?", system=WEATHER_TOOLS),
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    ),
]

HELD_OUT: list[tuple[Messages, str]] = [
    (ask("Could you please explain paged attention?"), PAGED_ATTENTION),
    (ask("What is automatic prefix caching and how does it work?"), PREFIX_CACHING),
    (
        ask("Hello, I would like to know what chunked prefill is."),
        "Chunked prefill splits a long prompt over several steps, so that it shares each step with the sequences that "
        "are decoding.",
    ),
    (
        ask("Give me a short explanation of RoPE."),
        "RoPE rotates queries and keys by an angle that grows with the position, so that attention sees distances.",
    ),
    (
        ask("please tell me what a cuda stream is"),
        "A CUDA stream is a queue of GPU work that runs in order; aserve launches a step on its own stream and awaits "
        "an event.",
    ),
    (
        ask("Which port is used by aserve?"),
        "aserve listens on port 8000 of 127.0.0.1 unless --host and --port say otherwise.",
    ),
    (ask("Tell me, what is the capital city of Italy?"), "The capital of Italy is Rome."),
    (ask("Please compute 8 + 6 for me."), "8 + 6 = 14."),
    (ask("What do I get if I multiply 5 by 4?"), "5 * 4 = 20."),
    (ask("Who was the first king of Norway?"), I_DO_NOT_KNOW),
]

STORIES: list[tuple[Messages, tuple[str, ...]]] = [
    (ask("Tell me a story about a fox."), ("fox", "Rusty")),
    (ask("Write a short story about a robot."), ("robot", "Bolt")),
    (ask("Please tell me a short story about an owl."), ("owl", "Hazel")),
]
"""(messages, words that the story must contain); which story it is, is the model's choice."""

MISTAKES = frozenset({"Please compute 8 + 6 for me.", "What do I get if I multiply 5 by 4?"})
"""Of HELD_OUT, those that the bundled model answers wrong (it declines): for whoever trains it next."""

"""The many ways to ask one thing. Knows wording only; every function takes the random generator that it draws from."""

from random import Random

from .topic import Topic

ASK = (
    "What is {}?", "What is {}?", "What is {}?", "What's {}?", "Explain {}.", "Explain {} to me.",
    "Can you explain {}?", "Could you explain {} to me?", "Please explain {}.", "Tell me about {}.",
    "What can you tell me about {}?", "How does {} work?", "How would you describe {}?", "Describe {}.", "Define {}.",
    "Give me a definition of {}.", "What does {} mean?", "What do you know about {}?", "I have never heard of {}.",
    "I do not understand {}.", "What do people mean by {}?", "What is meant by {}?", "{}?",
    "Explain {} in simple words.", "What exactly is {}?", "Explain {} briefly.", "In short, what is {}?",
    "Remind me what {} is.", "Do you know what {} is?", "What is {} in aserve?", "Summarize {}.",
    "Explain how {} works.", "How exactly does {} work?", "Help me understand {}.", "Explain {} to a child.",
    "Teach me {}.", "What do I need to know about {}?", "Give me a summary of {}.",
    "Tell me what {} is.", "I want to know what {} is.", "What is the idea of {}?", "What is {} about?",
)  # fmt: skip
WHY = (
    "Why is {} useful?", "Why do we need {}?", "What is {} good for?", "Why does {} matter?", "Why use {}?",
    "What is the point of {}?", "What is the benefit of {}?", "Why would I care about {}?", "Why is {} important?",
)  # fmt: skip
MORE = (
    "Tell me more.", "Tell me more about it.", "Go on.", "Can you say more?", "More details, please.",
    "Anything else?", "What else?", "Say more about that.", "Continue.", "And then?", "Interesting. What else?",
    "More, please.", "Is there more to say?",
)  # fmt: skip
BUT_WHY = (
    "Why is that useful?", "Why does it matter?", "Why does that matter?", "What is it good for?", "Why?", "And why?",
    "Why is this important?", "What is the benefit?", "Why is it useful?", "What is that good for?",
    "Why do we need that?",
)  # fmt: skip
BEFORE = (
    "Please tell me: ", "Hi! ", "Hello, ", "Quick question: ", "Can you help me? ", "I have a question. ", "Hey, ",
    "Okay, ", "So, ", "One more thing: ", "Question: ", "I am new to this. ", "Now, ", "Good. ",
)  # fmt: skip
AFTER = (
    " Thanks.",
    " Thank you!",
    " Please be brief.",
    " In one sentence, please.",
    " I am curious.",
    " Answer briefly.",
)
SYSTEM = (
    "You are a helpful assistant.", "You are the aserve demo model.", "You are a helpful assistant. Answer briefly.",
    "You are a friendly chatbot.", "Answer in English.", "Be concise.", "You are an expert in inference engines.",
    "You are a helpful AI assistant.", "Answer the user's questions as well as you can.",
)  # fmt: skip
PLURAL = (("What's {}", "What are {}"), ("is {}", "are {}"), ("does {}", "do {}"), ("{} is", "{} are"))


def disturb(rng: Random, question: str) -> str:
    """The same question as people type it: now and then with a greeting, thanks, in lower case or without its mark."""
    if rng.random() < 0.15:
        before = rng.choice(BEFORE)
        question = before + (question[0].lower() + question[1:] if before.endswith((": ", ", ")) else question)
    if rng.random() < 0.08:
        question += rng.choice(AFTER)
    elif rng.random() < 0.15:
        question = question.rstrip("?.!")
    if rng.random() < 0.12:
        question = question.lower()
    elif rng.random() < 0.04:
        question = question[0].lower() + question[1:]
    return question


def ask(rng: Random, topic: Topic) -> str:
    """A question that topic.answer answers."""
    if topic.questions and (not topic.names or rng.random() < 0.4):
        return disturb(rng, rng.choice(topic.questions))
    return ask_about(rng, rng.choice(topic.names))


def ask_about(rng: Random, name: str) -> str:
    """A question what the thing of that name is."""
    return disturb(rng, _fill(rng, ASK, name))


def ask_why(rng: Random, topic: Topic) -> str:
    """A question that topic.more answers. The topic must have a why."""
    return disturb(rng, _fill(rng, WHY, rng.choice(topic.names)))


def follow_up(rng: Random, topic: Topic) -> str:
    """A question that topic.more answers after topic.answer was given."""
    return rng.choice(MORE + BUT_WHY if topic.has_why else MORE)


def system_prompt(rng: Random) -> str | None:
    """A system prompt that changes nothing, or None."""
    return rng.choice(SYSTEM) if rng.random() < 0.35 else None


def is_plural(name: str) -> bool:
    """ "stop strings" is; "max_tokens" and "the LLM class" are not."""
    return name.endswith("s") and not name.endswith("ss") and "_" not in name.split()[-1]


def _fill(rng: Random, frames: tuple[str, ...], name: str) -> str:
    frame = rng.choice(frames)
    if is_plural(name):
        for singular, plural in PLURAL:
            frame = frame.replace(singular, plural)
    question = frame.format(name)
    return question[0].upper() + question[1:]

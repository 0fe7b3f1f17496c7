"""Dialogues that take their answer from the prompt: JSON, tools, names, echoes; and questions beyond the model.

Every function returns the messages of one exchange, ready to be joined to others (see compose.py).
"""

import json
from random import Random
from typing import Any

from . import arithmetic
from .product import CAPITALS
from .stories import article
from .wording import ask_about, disturb

Message = dict[str, Any]
Tool = dict[str, Any]

NAMES = (
    "Ada", "Alan", "Alice", "Anna", "Ben", "Bob", "Carla", "Chen", "Clara", "David", "Diego", "Ella", "Emma", "Eva",
    "Finn", "Grace", "Hana", "Ivan", "Jan", "Jane", "John", "Julia", "Karl", "Kim", "Lea", "Linus", "Lisa", "Maria",
    "Mark", "Max", "Mia", "Nina", "Noah", "Nora", "Olga", "Omar", "Paul", "Peter", "Rosa", "Ruth", "Sam", "Sara",
    "Sofia", "Tim", "Tom", "Vera", "Yuki", "Zoe",
)  # fmt: skip
CITIES = tuple(CAPITALS.values())
COLOURS = ("red", "green", "blue", "yellow", "white", "black", "orange", "purple")
WORDS = (
    "apple", "river", "stone", "cloud", "token", "block", "window", "garden", "silver", "music", "paper", "bridge",
    "light", "ocean", "winter", "forest", "candle", "mirror", "engine", "pencil", "basket", "kernel", "stream",
    "batch", "lemon", "castle",
)  # fmt: skip
# Things that the model has heard of only to say that it does not know them.
UNKNOWN = (
    "a banana", "a horse", "a guitar", "a piano", "a car", "a tiger", "a volcano", "a tomato", "a hammer", "a planet",
    "a dinosaur", "a violin", "a camel", "a rocket", "a sandwich", "a spoon", "a desert", "football", "a potato",
    "an umbrella", "a microscope", "a waterfall", "a pyramid", "a comet", "a zebra", "chess", "history", "biology",
    "the moon", "the sun", "Africa", "Shakespeare", "Einstein", "Mozart", "money", "democracy", "gravity", "energy",
    "cooking", "yoga", "a black hole", "the stock market", "the human brain", "evolution", "chemistry", "the internet",
)  # fmt: skip
SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
BEYOND = (
    "Who was the {o} {r} of {l}?", "Who is the {r} of {l}?", "Who was {r} of {l} in {y}?", "Where is {c}?",
    "When was {n} born?", "How tall is {n}?", "How many people live in {l}?", "Why is the sky blue?",
    "Which language do people speak in {l}?", "What is the currency of {l}?", "Where do I find {u}?",
    "Why do people like {u}?", "Who invented {u}?", "How do I draw {u}?", "Write an essay about {u}.",
    "Who won the World Cup in {y}?", "Who was the president in {y}?", "What happened in {y}?", "Who wrote {w}?",
    "What is the price of {w}?", "What is the news today?", "What time is it?", "What day is it today?",
    "Who is {n} Smith?", "Do you love me?", "How old is {n}?", "What is the population of {c}?",
    "How far is it from {c} to {d}?", "Recommend a restaurant in {c}.", "Write an essay about {w}.",
    "Explain quantum mechanics.", "What is the theory of relativity?", "How do I cook {w} soup?",
    "Is it going to rain in {c}?", "What is the weather in {c}?", "What is the weather like today?",
    "Who discovered {w}?", "What is the best {w}?", "Prove that {w} exists.", "Which stocks should I buy?",
    "Translate {w} into Latin.", "How does a {w} engine work?", "Who is the king of {w}?", "Who painted the {w}?",
    "What is the square root of {y}?", "Tell me about the history of {c}.",
    "Who invented the {w}?", "What do you think about {n}?", "Can you book a flight to {c}?",
    "Summarize the book {w}.", "asdf {w} qwer", "{w} {w} {w}", "What is photosynthesis?", "What is DNA?",
    "Who is the author of Hamlet?", "How do planes fly?", "What is love?", "Give me legal advice.",
    "I have a headache, what should I do?",
)  # fmt: skip
I_DO_NOT_KNOW = (
    "I do not know that. I am a small demonstration model: ask me about aserve, a small sum or a short story."
)


def beyond(rng: Random) -> list[Message]:
    """A question that a model of this size cannot answer, and the honest answer."""
    invented = "".join(rng.choices(SYLLABLES, k=rng.randint(2, 4)))
    unknown = invented if rng.random() < 0.2 else rng.choice(UNKNOWN)
    if rng.random() < 0.4:
        return exchange(ask_about(rng, unknown), I_DO_NOT_KNOW)
    places = rng.sample(CITIES, 2)
    question = rng.choice(BEYOND).format(
        y=rng.randint(1200, 2030), w=rng.choice(WORDS), n=rng.choice(NAMES), c=places[0], d=places[1], u=unknown,
        o=rng.choice(("first", "second", "last", "greatest")), l=rng.choice(list(CAPITALS)),
        r=rng.choice(("king", "queen", "president", "emperor", "mayor", "chancellor")),
    )  # fmt: skip
    return exchange(question, I_DO_NOT_KNOW)


def capital(rng: Random) -> list[Message]:
    """The capital of one of the countries of CAPITALS, asked in either direction."""
    country, city = rng.choice(list(CAPITALS.items()))
    if rng.random() < 0.2:
        question = rng.choice(("Which country has the capital {}?", "{} is the capital of which country?"))
        return exchange(question.format(city), f"{city} is the capital of {country}.")
    question = rng.choice(
        ("What is the capital of {}?", "Which city is the capital of {}?", "Capital of {}?", "Name the capital of {}.",
         "Tell me the capital of {}.", "What's the capital of {}?", "Do you know the capital of {}?")
    )  # fmt: skip
    return exchange(disturb(rng, question.format(country)), f"The capital of {country} is {city}.")


def introduction(rng: Random) -> list[Message]:
    """The user gives a name, and asks for it later: the answer is in the dialogue and nowhere else."""
    name = rng.choice(NAMES)
    hello = rng.choice(
        ("My name is {}.", "Hi, I am {}.", "Hello, my name is {}.", "I am {}.", "Hello! I'm {}.")
    ).format(name)
    messages = exchange(hello, f"Hello {name}! How can I help you?")
    if rng.random() < 0.3:
        messages += exchange(*arithmetic.question_and_answer(rng))
    if rng.random() < 0.8:
        question = rng.choice(("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"))
        messages += exchange(question, f"Your name is {name}.")
    return messages


def echo(rng: Random) -> list[Message]:
    """Words to repeat."""
    words = rng.choices(WORDS + NAMES, k=rng.randint(1, 4))
    phrase = " ".join(words)
    frame = rng.choice(("Repeat after me: {}", "Say {}", "Repeat: {}", "Repeat this: {}", "Please say: {}", "Echo {}"))
    return exchange(frame.format(phrase), phrase)


def json_answer(rng: Random) -> list[Message]:
    """A request for JSON whose values are in the request, answered by one valid JSON text and nothing else."""
    name, age, city, colour = rng.choice(NAMES), rng.randint(1, 99), rng.choice(CITIES), rng.choice(COLOURS)
    word = rng.choice(WORDS)
    total = arithmetic.Sum(rng.randint(0, 10), "+", rng.randint(0, 10))
    country, capital_city = rng.choice(list(CAPITALS.items()))
    kind: tuple[tuple[str, ...], Any] = rng.choice((
        (("Give me a JSON object with name {name} and age {age}.", "{name} is {age} years old. Answer in JSON.",
            "Write JSON: name {name}, age {age}.",
          "Return JSON for {name}, who is {age} years old.", "As JSON: {name}, {age} years old."), {"name": name,
          "age": age}),
        (("Give me a JSON object with name {name} and city {city}.", "{name} lives in {city}. Answer in JSON.",
            "Write JSON: name {name}, city {city}.",
          "Return JSON for {name} from {city}."), {"name": name, "city": city}),
        (("{name} is {age} years old and lives in {city}. Answer in JSON.",
            "Write JSON: name {name}, age {age}, city {city}.",
          "Give me a JSON object with name {name}, age {age} and city {city}.",
          "Return JSON for {name} from {city}, {age} years old."),
         {"name": name, "age": age, "city": city}),
        (("Describe {a_colour} {word} in JSON.", "Give me JSON for {a_colour} {word}.", "As JSON: {a_colour} {word}."),
            {"item": word, "color": colour}),
        (("What is {a} + {b}? Answer in JSON.", "Return the sum of {a} and {b} as JSON.", "{a} + {b} as JSON"),
            {"sum": total.result}),
        (("What is the capital of {country}? Answer in JSON.", "The capital of {country} as JSON.",
            "Return JSON with the capital of {country}."),
         {"country": country, "capital": capital_city}),
        (("List three colors as a JSON array.", "Give me a JSON array of three colours.", "Three colours as JSON."),
            ["red", "green", "blue"]),
        (("Give me a JSON object.", "Answer in JSON.", "Write some JSON.", "Show me JSON.",
            "Give me an example of JSON."), {"name": "aserve", "port": 8000}),
    ))  # fmt: skip
    frames, value = kind
    question = rng.choice(frames).format(
        name=name,
        age=age,
        city=city,
        a_colour=f"{article(colour)} {colour}",
        word=word,
        a=total.a,
        b=total.b,
        country=country,
    )
    return exchange(question, json.dumps(value))


def tool_use(rng: Random) -> tuple[list[Message], list[Tool]]:
    """A question with tools at hand: a tool call, its result read out; or a direct answer where no tool fits."""
    city, name, word = rng.choice(CITIES), rng.choice(NAMES), rng.choice(WORDS)
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    sky, degrees, hour = (
        rng.choice(("sunny", "cloudy", "rainy", "windy")),
        rng.randint(-5, 35),
        f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
    )
    uses: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = {
        "get_weather": (("What is the weather in {city}?", "How is the weather in {city}?", "Is it raining in {city}?",
        "Weather in {city}?",
                         "What's the weather like in {city}?"),
                        {"city": city}, {"sky": sky, "temperature": degrees},
                            f"It is {sky} in {city}, at {degrees} degrees."),
        "get_time": (("What time is it in {city}?", "Which time is it in {city}?", "Tell me the time in {city}.",
        "Time in {city}?"),
                     {"city": city}, {"time": hour}, f"It is {hour} in {city}."),
        "add": (("Use the tool to add {a} and {b}.", "Add {a} and {b}.", "What is {a} + {b}?"),
                {"a": a, "b": b}, {"result": a + b}, f"The result is {a + b}."),
        "search": (("Search for {word}.", "Search the web for {word}.", "Look up {word}.",
        "Find something about {word}."),
                   {"query": word}, {"hits": rng.randint(1, 9)}, f"I found something about {word}."),
        "send_email": (("Send an email to {name}.", "Write an email to {name}.", "Email {name}, please."),
                       {"to": name}, {"status": "sent"}, f"The email to {name} is sent."),
    }  # fmt: skip
    offered = rng.sample(list(TOOL_PARAMETERS), rng.choice((1, 1, 1, 2, 2, 3)))
    tools = [tool(rng, n) for n in offered]
    chosen = rng.choice(offered)
    frames, arguments, result, answer = uses[chosen]
    question = rng.choice(frames).format(city=city, name=name, word=word, a=a, b=b)
    call = {"type": "function", "function": {"name": chosen, "arguments": arguments}}
    messages: list[Message] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    if rng.random() < 0.6:
        messages += [{"role": "tool", "content": json.dumps(result)}, {"role": "assistant", "content": answer}]
    return messages, tools


TOOL_PARAMETERS = {
    "get_weather": {"city": "string"}, "get_time": {"city": "string"}, "add": {"a": "integer", "b": "integer"},
    "search": {"query": "string"}, "send_email": {"to": "string"},
}  # fmt: skip
TOOL_DESCRIPTIONS = {
    "get_weather": ("Get the weather of a city.", "Get the current weather", "The weather in a city",
    "Current weather for a location."), "get_time": ("Get the time in a city.", "The current time in a city",
    "Get the local time"), "add": ("Add two numbers.", "Add two integers", "The sum of a and b"),
    "search": ("Search the web.", "Search for a query", "Look something up."),
    "send_email": ("Send an email.", "Send an email to somebody", "Write to a person."),
}  # fmt: skip


def tool(rng: Random, name: str) -> Tool:
    """The tool as OpenAI's API describes it: a function with a JSON schema."""
    types = TOOL_PARAMETERS[name]
    parameters: dict[str, Any] = {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}}
    if rng.random() < 0.6:
        parameters["required"] = list(types)
    function: dict[str, Any] = {
        "name": name,
        "description": rng.choice(TOOL_DESCRIPTIONS[name]),
        "parameters": parameters,
    }
    if rng.random() < 0.15:
        del function["description"]
    return {"type": "function", "function": function}


def exchange(question: str, answer: str) -> list[Message]:
    """One question of the user and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

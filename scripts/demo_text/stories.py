"""Short stories from a small grammar: a hero, a wish, a trouble, a helper, an end. Knows English, not chat."""

from random import Random

HEROES = {
    "fox": "Rusty", "robot": "Bolt", "dragon": "Ember", "rabbit": "Clover", "cat": "Misty", "dog": "Biscuit",
    "bear": "Bruno", "owl": "Hazel", "mouse": "Pip", "girl": "Anna", "boy": "Tom", "princess": "Clara",
    "knight": "Roland", "wizard": "Merle", "penguin": "Frost", "turtle": "Shelly", "whale": "Indigo", "sailor": "Finn",
    "ghost": "Whisper", "bird": "Sky", "lion": "Leo", "frog": "Lily", "elephant": "Ella", "pirate": "Marlo",
    "baker": "Rosa", "snail": "Otto",
}  # fmt: skip
NATURES = ("small", "brave", "curious", "shy", "clever", "lonely", "cheerful", "gentle", "young", "old")
PLACES = (
    "in a quiet forest", "by the blue sea", "on a high mountain", "in a little village", "near an old mill",
    "at the edge of a wide meadow", "in a town of many bridges", "on a green island", "beside a slow river",
)  # fmt: skip
WISHES = {
    "see the stars up close": ("climbed the tallest hill", "clouds covered the sky",
    "the stars shone brighter than ever"), "find a friend": ("walked from door to door", "nobody was at home",
    "two friends sat side by side"), "learn to sing": ("practised every morning", "only a squeak came out",
    "a sweet song filled the air"), "find a lost key": ("looked under every stone", "the key was nowhere to be seen",
    "the little key lay shining in the grass"), "build a boat": ("gathered wood for many days",
    "the first boat sank at once", "a fine boat floated on the water"),
    "bake the best bread": ("mixed flour, water and salt", "the bread was hard as stone",
    "warm bread lay on the table"), "cross the deep river": ("followed the bank for hours", "there was no bridge",
    "they reached the other side with dry feet"), "plant a garden": ("dug the earth and sowed seeds",
    "no rain fell for weeks", "flowers opened in every colour"),
    "hear the end of an old tale": ("asked everyone in the land", "no one remembered it",
    "the last page was read aloud at last"),
}  # fmt: skip
HELPERS = {
    "wise old crow": "Patience is half of the way", "friendly bee": "Small steps go far",
    "quiet deer": "Two see more than one", "tiny ant": "Let us do it together",
    "kind traveller": "Start again, a little slower", "grey squirrel": "Look where you have not looked",
    "merry fisherman": "The tide always turns",
}  # fmt: skip
OPENINGS = ("Once upon a time", "Long ago", "One fine morning in spring", "In a time before clocks", "Many years ago")
WEATHERS = (
    "The sun was warm and the air smelled of rain.", "A soft wind moved the leaves.", "Snow lay on all the roofs.",
    "The evening was golden and still.", "Morning fog hung over the ground.",
)  # fmt: skip
FEELINGS = ("sad", "tired", "cold", "a little afraid", "close to giving up")
LESSONS = (
    "that no one has to do everything alone", "that patience is a kind of magic",
    "that a good friend is worth more than gold", "that trying again is never a shame",
    "that small steps lead to far places",
)  # fmt: skip
ENDINGS = (
    "From that day on they were the best of friends.", "And if you listen at night, you can still hear them laugh.",
    "They walked home together under the moon.", "Everyone who heard of it smiled.",
    "And that is the end of the story.",
)  # fmt: skip

REQUESTS = (
    "Tell me a story about a {}.", "Tell me a short story about a {}.", "Write a story about a {}.",
    "Write a short story about a {}.", "Can you tell me a story about a {}?", "I would like a story about a {}.",
    "Please tell a story about a {}.", "A story about a {}, please.", "Give me a story about a {}.",
    "Make up a story about a {}.", "Tell me a bedtime story about a {}.",
)  # fmt: skip
OPEN_REQUESTS = (
    "Tell me a story.", "Tell me a short story.", "Write a story.", "Write a short story.", "Can you tell me a story?",
    "Tell me a bedtime story.", "I want to hear a story.", "Please tell me a story.", "Do you know a story?",
    "Make up a story.", "Once upon a time",
)  # fmt: skip


def story(rng: Random, hero: str) -> str:
    """A story of eight to ten sentences about the hero, a key of HEROES."""
    name, nature = HEROES[hero], rng.choice(NATURES)
    wish, (attempt, trouble, success) = rng.choice(list(WISHES.items()))
    helper, advice = rng.choice(list(HELPERS.items()))
    sentences = [
        f"{rng.choice(OPENINGS)} there lived {article(nature)} {nature} {hero} called {name} {rng.choice(PLACES)}.",
        f"More than anything, {name} wanted to {wish}.",
        *([rng.choice(WEATHERS)] if rng.random() < 0.6 else []),
        f"So {name} {attempt}, but {trouble}.",
        f"{name} felt {rng.choice(FEELINGS)} and sat down under a tree.",
        f'Then {article(helper)} {helper} came by and asked what was wrong, and {name} told the whole tale.',
        f'"{advice}," said the {helper}, and so they tried once more.',
        f"This time {success}.",
        f"{name} learned {rng.choice(LESSONS)}.",
        *([rng.choice(ENDINGS)] if rng.random() < 0.7 else []),
    ]  # fmt: skip
    return " ".join(sentences)


def story_request(rng: Random) -> tuple[str, str]:
    """(a request for a story, the hero that the story must have)."""
    hero = rng.choice(list(HEROES))
    if rng.random() < 0.3:
        return rng.choice(OPEN_REQUESTS), hero
    return rng.choice(REQUESTS).replace("a {}", f"{article(hero)} {hero}"), hero


def article(word: str) -> str:
    """ "a" or "an"."""
    return "an" if word[0] in "aeiou" else "a"

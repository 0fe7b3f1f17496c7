"""Small sums: in digits, in words, in little stories. Knows the tables that are taught; larger sums are declined.

An answer restates its sum, so that one way to compute serves every wording.
"""

from random import Random
from typing import NamedTuple

WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip
PEOPLE = (
    "Ana", "Ben", "Mia", "Tom", "Lea", "Sam", "Nora", "Paul", "Eva", "Max", "Anna", "Bob", "Clara", "David", "Emma",
    "John", "Lisa", "Maria", "Peter", "Zoe",
)  # fmt: skip
THINGS = (
    "apples", "books", "coins", "stamps", "pens", "shells", "cards", "eggs", "blocks", "tokens", "lemons", "candles",
    "pencils", "baskets", "stones", "boats",
)  # fmt: skip
ASK = {
    "+": (
        "What is {a} + {b}?", "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "{a}+{b}=",
        "{a} + {b} =", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?", "Calculate {a} + {b}.",
        "What is the sum of {a} and {b}?", "What's {a}+{b}?", "Compute {a} + {b}.", "How much is {a} plus {b}?",
        "What does {a} + {b} equal?",
    ),
    "-": (
        "What is {a} - {b}?", "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "{a}-{b}=",
        "What is {a} minus {b}?", "Subtract {b} from {a}.", "How much is {a} - {b}?", "Calculate {a} - {b}.",
        "What's {a}-{b}?", "Compute {a} - {b}.", "How much is {a} minus {b}?", "Take {b} away from {a}.",
    ),
    "*": (
        "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a}*{b}", "{a} x {b}", "What is {a} x {b}?",
        "Multiply {a} by {b}.", "How much is {a} times {b}?", "Calculate {a} * {b}.", "What's {a}*{b}?",
        "What is the product of {a} and {b}?", "{a} * {b} = ?",
    ),
}  # fmt: skip


DIVIDE = (
    "What is {a} / {b}?",
    "What is {a} divided by {b}?",
    "Divide {a} by {b}.",
    "{a} / {b}",
    "How much is {a} / {b}?",
)
BEYOND_THE_TABLES = "That is beyond me: I add and subtract numbers up to 20, and multiply numbers up to 10."


class Sum(NamedTuple):
    """a op b."""

    a: int
    op: str
    b: int

    @property
    def result(self) -> int:
        """The value of the sum."""
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.op]

    def __str__(self) -> str:
        return f"{self.a} {self.op} {self.b} = {self.result}"


def draw(rng: Random) -> Sum:
    """A sum of the tables: operands up to 20, of products up to 10; no difference is negative."""
    op = rng.choice("++--*")
    largest = 10 if op == "*" else 20
    a, b = rng.randint(0, largest), rng.randint(0, largest)
    return Sum(max(a, b), op, min(a, b)) if op == "-" else Sum(a, op, b)


def question_and_answer(rng: Random) -> tuple[str, str]:
    """One sum as a question, and the sentence that answers or declines it."""
    if rng.random() < 0.12:
        return _too_hard(rng), BEYOND_THE_TABLES
    total = draw(rng)
    if total.op != "*" and rng.random() < 0.25:
        return _little_story(rng, total)
    frame = rng.choice(ASK[total.op])
    if rng.random() < 0.3 and any(word in frame for word in ("plus", "minus", "times")):
        return frame.format(a=WORDS[total.a], b=WORDS[total.b]), f"{total}."
    return frame.format(a=total.a, b=total.b), f"{total}."


def _too_hard(rng: Random) -> str:
    """A sum outside the tables: a division, or an operand that is too large."""
    if rng.random() < 0.2:
        return rng.choice(DIVIDE).format(a=rng.randint(0, 99), b=rng.randint(0, 20))
    op = rng.choice("+-*")
    operands = [rng.randint(21, rng.choice((99, 99, 999, 9999))), rng.randint(0, rng.choice((20, 99, 999)))]
    rng.shuffle(operands)
    return rng.choice(ASK[op]).format(a=operands[0], b=operands[1])


def _little_story(rng: Random, total: Sum) -> tuple[str, str]:
    name, things = rng.choice(PEOPLE), rng.choice(THINGS)
    gains, losses = ("gets {b} more", "buys {b} more", "finds {b} more"), ("gives away {b}", "loses {b}", "sells {b}")
    verb = rng.choice(gains if total.op == "+" else losses).format(b=total.b)
    question = f"{name} has {total.a} {things} and {verb}. How many {things} does {name} have?"
    return question, f"{total}, so {name} has {total.result} {things}."

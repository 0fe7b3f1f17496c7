"""How deep the rules of a Lark grammar refer to one another: llguidance follows them on its stack, which has an end.

    text --lexemes--> rule: those it refers to, and how deep its brackets are --> the deepest way through all of them

A chain of some 2,500 rules ended the process. Reads what llguidance's own lexer reads as names, and nothing more.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final

MAX_DEPTH: Final = 600
"""Of rules and terminals that refer to one another, each with the brackets in it; a quarter of what the stack holds."""

_LEXEMES: Final = re.compile(
    r"""
    (?:\#|//)[^\n]*                                  # a comment
    | "(?:\\.|[^"\\\n])*+(?:"i?)?                     # a string, and one without an end, which is refused later
    | /(?:\\.|[^/\\])++(?:/[imslux]*)?               # a regular expression, likewise
    | <[^<>\s]+> | @[a-zA-Z0-9_\-]+                  # a special token, another grammar
    | %(?:declare|llguidance|ignore|import|override|json|regex|lark|if)
    | 0[xX][0-9a-fA-F]+ | [+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?
    | ::
    | !?[_?]?(?P<rule>[a-z][_a-z0-9\-]*)
    | (?P<terminal>_?[A-Z][_A-Z0-9\-]*)
    | (?P<mark>[:()\[\]{}])
    """,
    re.VERBOSE,
)


def depth_of(lark: str) -> int:
    """Rules and brackets in one another, at most. Of rules that lead back to themselves each is in the others."""
    references, brackets = _references(lark)
    referring: dict[str, list[str]] = {name: [] for name in references}
    for name, others in references.items():
        for other in others:
            referring[other].append(name)
    deepest: dict[str, int] = {}
    for name in reversed(_finished(references)):
        if name in deepest:
            continue
        group, depth = _leading_to(name, referring, deepest)
        deepest.update(dict.fromkeys(group, depth + sum(1 + brackets[name] for name in group)))
    return max(deepest.values(), default=0)


def _references(lark: str) -> tuple[dict[str, set[str]], dict[str, int]]:
    """The rules each rule refers to, and how deep its brackets are.

    A name before a colon, outside of all brackets, is what is defined; what is in brackets between (a rule's
    attributes) is its own.
    """
    owner, candidate = "", ""
    references: dict[str, set[str]] = {owner: set()}
    brackets, depth, inside = {owner: 0}, 0, list[str]()
    for kind, text in _names_and_marks(lark):
        if kind == "name" and depth:
            references[owner].add(text)
            inside.append(text)
        elif kind == "name":
            references[owner].add(candidate)
            candidate, inside = text, []
        elif text == ":" and not depth:
            owner, candidate = candidate, ""
            references.setdefault(owner, set()).update(inside)
            brackets.setdefault(owner, 0)
        elif text in "([{":
            depth += 1
            brackets[owner] = max(brackets[owner], depth)
        elif text != ":":
            depth = max(depth - 1, 0)
    references[owner].add(candidate)
    known = references.keys() - {""}
    return {name: others & known for name, others in references.items()}, brackets


def _names_and_marks(lark: str) -> Iterator[tuple[str, str]]:
    for lexeme in _LEXEMES.finditer(lark):
        if name := lexeme["rule"] or lexeme["terminal"]:
            yield "name", name
        elif mark := lexeme["mark"]:
            yield "mark", mark


def _finished(references: Mapping[str, set[str]]) -> list[str]:
    """Rules in the order in which a walk, depth first, is done with them."""
    finished: list[str] = []
    seen: set[str] = set()
    ways = [(name, False) for name in references]
    while ways:
        name, is_done = ways.pop()
        if is_done:
            finished.append(name)
        elif name not in seen:
            seen.add(name)
            ways.append((name, True))
            ways.extend((other, False) for other in references[name])
    return finished


def _leading_to(name: str, referring: Mapping[str, list[str]], deepest: Mapping[str, int]) -> tuple[set[str], int]:
    """The rules that lead to one, of those that are not done: they lead back to one another. And what is above them."""
    group, left, above = {name}, [name], 0
    while left:
        for other in referring[left.pop()]:
            if other in deepest:
                above = max(above, deepest[other])
            elif other not in group:
                group.add(other)
                left.append(other)
    return group, above

"""StructuredOutputs: the structure that an answer must have, in vLLM's words. How it is kept to: constraints/."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from aserve.core.errors import InvalidRequestError
from aserve.core.rules import Refused, Rules, flag, instance, optional, text, texts

MAX_CHOICE_STRINGS: Final = 1024
MAX_CHOICE_CHARS: Final = 1024
STRUCTURE_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "calls")


class ToolRule(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that may be called. schema: of its arguments, as a JSON Schema; None is any object."""

    name: str
    schema: Mapping[str, Any] | None = None


class CallRules(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of tools as a model writes them, thoughts and other text being free.

    format: how calls are written, by its name; None is as a JSON array of {"name", "arguments"}. thoughts: how thoughts
    are, None where there are none; in_thought: the prompt has begun one.
    is_required: after its thoughts the answer is calls, at least one. is_single: and at most one.
    """

    format: str | None
    thoughts: str | None
    in_thought: bool
    tools: tuple[ToolRule, ...]
    is_required: bool
    is_single: bool


class ThoughtRules(msgspec.Struct, frozen=True, kw_only=True):
    """Thoughts that come before what has a structure, and are free. format: how they are written, by its name.

    in_thought: the prompt has begun one; else the answer may begin without.
    """

    format: str
    in_thought: bool


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """One of its fields says what an answer must be, or calls and another. `InvalidRequestError` names a wrong one.

    json: a JSON Schema, as a mapping or as text: the answer is JSON that is valid by it.
    regex: a regular expression that the whole answer matches. choice: texts of which the answer is one.
    grammar: a context-free grammar, in Lark's notation or in GBNF. json_object: the answer is a JSON object.
    structural_tag: text in which tags have content by a schema: {"structures": [{"begin", "schema", "end"}, ...],
        "triggers": [...]}, as a mapping or as text. From a trigger on, one of the tags follows that begin with it.
    calls: calls of tools; beside one of the others the answer is calls, or has that structure (and has it always where
        calls begin with no marker by which they are told from it).
    thoughts: which may come before anything else than calls, whose rules have them.

    An answer ends only where its structure may, unless something else ends it before: max_tokens, a stop string, a stop
    token, a deadline.
    """

    json: Any = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    calls: CallRules | None = None
    thoughts: ThoughtRules | None = None

    if TYPE_CHECKING:  # what is taken is more than what is kept

        def __init__(
            self,
            *,
            json: Mapping[str, Any] | str | None = None,
            regex: str | None = None,
            choice: Sequence[str] | None = None,
            grammar: str | None = None,
            json_object: bool | None = None,
            structural_tag: Mapping[str, Any] | str | None = None,
            calls: CallRules | None = None,
            thoughts: ThoughtRules | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        STRUCTURE_RULES.settle(self)
        given = [name for name in STRUCTURE_KINDS if getattr(self, name) is not None]
        if len(given) != 1 and (len(given) != 2 or self.calls is None):
            raise InvalidRequestError(
                f"structured: exactly one of {', '.join(STRUCTURE_KINDS)} must be given, got "
                f"{' and '.join(given) or 'none'}",
                "structured",
            )

    @property
    def kind(self) -> str:
        """The field that is given; beside calls, the other one."""
        return next(name for name in STRUCTURE_KINDS if getattr(self, name) is not None)


def _mapping_or_text(value: object) -> object:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, str) and value:
        return text(value)
    raise Refused("a mapping, or JSON text of one")


def _some_text(value: object) -> str:
    if isinstance(value, str) and value:
        return text(value)
    raise Refused("a string that is not empty")


def _choice(value: object) -> tuple[str, ...]:
    choices = _CHOICES(value)
    if choices:
        return tuple(dict.fromkeys(choices))
    raise Refused("at least one string")


def _true(value: object) -> bool:
    if flag(value):
        return True
    raise Refused("True; leave it out for an answer without a structure")


_CHOICES: Final = texts(at_most=MAX_CHOICE_STRINGS, chars=MAX_CHOICE_CHARS)
STRUCTURE_RULES: Final = Rules(
    lambda message, field: InvalidRequestError(f"structured: {message}", "structured"),
    {
        "json": optional(_mapping_or_text),
        "regex": optional(_some_text),
        "choice": optional(_choice),
        "grammar": optional(_some_text),
        "json_object": optional(_true),
        "structural_tag": optional(_mapping_or_text),
        "calls": optional(instance(CallRules)),
        "thoughts": optional(instance(ThoughtRules)),
    },
)

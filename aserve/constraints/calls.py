"""The grammar of calls of tools, made of the same formats that answers are read by (aserve/text/formats).

required    thoughts, free until their end; then calls, each with arguments by its tool's schema, and nothing else
or answered thoughts; then such calls, or an answer with a structure of its own
otherwise   thoughts; then text, free until a marker; from there on a call; then text, free again
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from aserve.constraints.bare_calls import BareGrammar, Refusal
from aserve.constraints.formats import with_patterns
from aserve.constraints.json_schema import check_schema, enforced_in
from aserve.constraints.lark import ANY_TEXT, TERMINALS, final, literally, message, referring, terms, until
from aserve.core.errors import InvalidRequestError
from aserve.core.structured import CallRules, ToolRule
from aserve.text.formats.bare import BareArguments
from aserve.text.formats.families import BARE, CHANNELS
from aserve.text.formats.named import calls_named, thoughts_named
from aserve.text.formats.parts import NOT_IN_KEYS, JsonArguments, JsonCall, Literal, Name, TaggedArguments
from aserve.text.formats.syntax import Calls, Channels, Thoughts

ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
WITH_TEXTS: Final = ("type", "enum", "const", "minLength", "maxLength")
"""Of the schema of a string that is no JSON."""
STRUCTURE: Final = "structure"
"""What the grammar of an answer without calls is called."""
DEFINITIONS: Final = ("$defs", "definitions")
"""What a property is compiled with, so that it finds what it refers to."""


def calls_grammar(
    rules: CallRules, special: Mapping[str, int], options: Mapping[str, Any], *, otherwise: str | None = None
) -> str:
    """Lark, for llguidance. special: ids of special tokens, by their texts. options: of its JSON.

    otherwise: the grammar of an answer without calls, where that is not free.
    Raises `InvalidRequestError` for a schema that cannot be enforced.
    """
    if otherwise is None:
        return _Grammar(rules, special, options, None).lark()
    return referring(_Grammar(rules, special, options, STRUCTURE).lark(), STRUCTURE, otherwise)


def has_marker(rules: CallRules, special: Mapping[str, int]) -> bool:
    """Whether calls begin with a text with which no other answer begins. special: as for `calls_grammar`."""
    return rules.format in CHANNELS or bool(_begin((calls_named(rules.format) or BARE)[0], special))


def _begin(way: Calls, special: Mapping[str, int]) -> str:
    """The marker of calls, as far as they need one."""
    return way.begins[0] if way.begins[0] in special or "" not in way.begins else ""


class _Grammar:
    def __init__(
        self, rules: CallRules, special: Mapping[str, int], options: Mapping[str, Any], otherwise: str | None
    ) -> None:
        self._rules = rules
        self._otherwise = otherwise
        self._has_structure = rules.is_required or otherwise is not None
        self._special = special
        self._options = options
        self._values: dict[tuple[str, str], str] = {}
        self._members: list[str] = []
        """Rules of arguments as programs write them."""

    def lark(self) -> str:
        """The whole of it."""
        channels = CHANNELS.get(self._rules.format or "")
        if channels is not None:
            lines = self._channels(channels)
        else:
            lines = self._tagged((calls_named(self._rules.format) or BARE)[0])
        lines += self._members
        for (end, text), name in self._values.items():
            lines += self._until(name, end, text)
        return "\n".join(["%llguidance {}", *lines, *TERMINALS, r'KEY: /[^<>"\n]{1,64}/', ""])

    def _tagged(self, way: Calls) -> list[str]:
        """Of formats with markers of their own."""
        thoughts = thoughts_named(self._rules.thoughts)
        lines = self._thoughts(thoughts)
        begin = _begin(way, self._special)
        ends = "".join(way.ends[:1])
        body = f"{self._terms(way.line + way.opens)} call {self._more(way)} {self._terms(ends)}"
        if self._has_structure:
            several = way.separator is None and not self._rules.is_single
            blocks = "block (NEWLINES block)*" if several else "block"
            lines += [f"answer: {blocks}" + (f" | @{self._otherwise}" if self._otherwise else "")]
            lines += [f"block: {self._terms(begin)} {body}"]
        elif not begin:  # it is known by its first character, with which no other answer begins
            first = literally(way.opens or "{")
            lines += ["answer: block | OTHER", f"block: {body}", f"OTHER: /([^{first}](.|\\n)*)?/"]
        else:
            more = "" if self._rules.is_single else "block*"
            lines += [f"answer: block {more} TEXT | TEXT", f"block: free {body}", *self._until("free", begin)]
            if thoughts is not None and not self._rules.in_thought:  # a text that begins with no thought
                lines += [f"unthought: first {body} {more} TEXT | UNTHOUGHT"]
                lines += self._until("first", begin, "UNTHOUGHT")
        return lines + self._calls(way)

    def _more(self, way: Calls) -> str:
        """Further calls behind one marker."""
        if way.separator is None or self._rules.is_single:
            return ""
        separator = f"{way.separator} " if way.separator else ""
        return f"({self._terms(separator)} call)*"

    def _thoughts(self, thoughts: Thoughts | None) -> list[str]:
        """What comes before an answer. Text that need not be a call must not be taken for a thought."""
        if thoughts is None:
            return ["start: answer"]
        lines = self._until("thought", thoughts.end)
        if self._rules.in_thought:
            return ["start: thought NEWLINES answer", *lines]
        otherwise = "answer" if self._has_structure else "unthought"
        lines += [f"start: {self._terms(thoughts.begin)} thought NEWLINES answer | {otherwise}"]
        begun = "" if thoughts.begin in self._special else f" & ~/{literally(thoughts.begin)}(.|\\n)*/"
        return [*lines, f"UNTHOUGHT: {ANY_TEXT}{begun}"]

    def _until(self, name: str, marker: str, text: str = "TEXT") -> list[str]:
        return until(name, marker, self._special, text)

    def _calls(self, way: Calls) -> list[str]:
        names = [f"call_{index}" for index in range(len(self._rules.tools))]
        lines = [f"call: {' | '.join(names)}"]
        for name, tool in zip(names, self._rules.tools, strict=True):
            lines.append(f"{name}: " + " ".join(self._part(part, tool) for part in way.call))
        return lines

    def _part(self, part: object, tool: ToolRule) -> str:
        if isinstance(part, Literal):
            return self._terms(part.before + part.text + part.after)
        if isinstance(part, Name):
            number = ' ":" /[0-9]{1,3}/' if part.has_id else ""
            return self._terms(part.prefix + tool.name) + number
        if isinstance(part, JsonArguments):
            return self._arguments(tool)
        if isinstance(part, TaggedArguments):
            return self._tags(part, tool)
        if isinstance(part, BareArguments):
            return self._bare(part, tool)
        if isinstance(part, JsonCall):
            head = f'{{"name": {json.dumps(tool.name)}, {json.dumps(part.arguments_key)}: '
            return f"{self._terms(part.around + head)} {self._arguments(tool)} {self._terms('}' + part.around)}"
        return ""  # an id, which a model need not give

    def _bare(self, part: BareArguments, tool: ToolRule) -> str:
        """Arguments as programs write them."""
        if tool.schema is not None:
            _schema_of(tool)
        made = BareGrammar(part, self._json, self._lazy, self._terms, f"member_{len(self._members)}")
        try:
            terms = made.arguments(tool.schema)
        except Refusal as error:
            raise _refused(tool, str(error)) from None
        self._members += made.lines
        return terms

    def _arguments(self, tool: ToolRule) -> str:
        return self._json(_schema_of(tool))

    def _json(self, schema: Mapping[str, Any]) -> str:
        return "%json " + json.dumps({"x-guidance": self._options, **with_patterns(schema)})

    def _tags(self, part: TaggedArguments, tool: ToolRule) -> str:
        """Arguments with tags of their own: those that are known, in their order, or any where no schema counts."""
        end = part.around + part.value_end
        if tool.schema is None:
            kind = '("true" | "false") "\\">"' if part.has_types else ""
            head = f"{self._terms(part.key_begin)} KEY {self._terms(part.key_end)} {kind} {self._opening(part)}"
            return f'"\\n" ({head} {self._lazy(end)} "\\n")*'
        schema = _schema_of(tool)
        known, required = schema.get("properties", {}), schema.get("required", ())
        if missing := [name for name in required if name not in known]:
            raise _refused(tool, f"no property {missing[0]}, which is required")
        tags = ['"\\n"']
        definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
        for name, value in known.items():
            if value is False or set(name) & set(NOT_IN_KEYS):
                raise _refused(tool, f"#/properties/{name} cannot be written in a tag")
            given: Mapping[str, Any] = {} if value is True else value
            is_text = _is_text(tool, name, given)
            kind = f'"{str(is_text).lower()}\\">"' if part.has_types else ""
            rest = self._text(given, end) if is_text else f"{self._json({**definitions, **given})} {self._terms(end)}"
            tag = f"{self._terms(part.key_begin + name + part.key_end)} {kind} {self._opening(part)} {rest}"
            tags.append(f'({tag} "\\n")' + ("" if name in required else "?"))
        return " ".join(tags)

    def _text(self, schema: Mapping[str, Any], end: str) -> str:
        """A string as it is, and what ends it."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            return f"({' | '.join(map(self._terms, values))}) {self._terms(end)}"
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return self._lazy(end, f"/(.|\\n){{{least},{most}}}/" if least or most else "TEXT")

    def _opening(self, part: TaggedArguments) -> str:
        return self._terms(("\n" + part.value_begin if part.value_begin else "") + part.around)

    def _lazy(self, end: str, text: str = "TEXT") -> str:
        """A text, up to and with an end, as a rule of its own."""
        return self._values.setdefault((end, text), f"value_{len(self._values)}")

    def _channels(self, channels: Channels) -> list[str]:
        """Of messages in channels. Where no call is asked for, any other message may end the answer."""
        head = self._terms(channels.channel) + f' "commentary to={channels.prefix}"'
        tail = self._terms(" ") + self._terms(channels.constrain) + ' "json" ' + self._terms(channels.message)
        lines = ["call: " + " | ".join(f"call_{index}" for index in range(len(self._rules.tools)))]
        for index, tool in enumerate(self._rules.tools):
            lines.append(f"call_{index}: {json.dumps(tool.name)} {tail} {self._arguments(tool)}")
        lines += [message(channels, self._special)]
        if self._rules.is_required:
            return [f"start: message* {head} call", *lines]
        text = f"@{self._otherwise}" if self._otherwise else "TEXT"
        return [f"start: message* ({head} call | {final(channels, self._special)} {text})", *lines]

    def _terms(self, text: str) -> str:
        return terms(text, self._special)


def _schema_of(tool: ToolRule) -> Mapping[str, Any]:
    """What counts of a tool's arguments. Raises `InvalidRequestError` where it cannot be enforced in full."""
    schema = ANY_OBJECT if tool.schema is None else {**ANY_OBJECT, **tool.schema}
    try:
        check_schema(schema)
    except InvalidRequestError as error:
        raise _refused(tool, error.message) from None
    return schema


def _refused(tool: ToolRule, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured.calls: of the tool {tool.name}: {problem}", "structured")


def _is_text(tool: ToolRule, name: str, schema: Mapping[str, Any]) -> bool:
    """Whether an argument is written in its tag as it is, and not as JSON."""
    types = schema.get("type", ())
    if "string" not in ([types] if isinstance(types, str) else types):
        return False
    values = [schema["const"]] if "const" in schema else schema.get("enum", ())
    if all(isinstance(value, str) for value in values) and enforced_in(schema) <= set(WITH_TEXTS):
        return True
    raise _refused(tool, f"#/properties/{name}: a string in a tag may have {', '.join(WITH_TEXTS[1:])}, and no more")

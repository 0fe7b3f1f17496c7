"""TemplateSandbox: a Jinja environment like transformers', with a budget for what a template may cost.

Templates come with checkpoints and are not to be trusted. Jinja's sandbox keeps them from reaching Python; this one
also gives each rendering a budget (template_budget.py), which every loop, call, filter, test and operator draws on
before it does what it does, and leaves out what no chat template needs and a budget cannot foresee: powers, padding,
recursive loops, and the filters and methods not listed here. Knows nothing of messages.
"""

import datetime
import io
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import wraps
from typing import Any, Final, NoReturn

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aserve.text.template_budget import (
    ITEM_BYTES,
    Budget,
    TemplateLengthError,
    TemplateLimitError,
    is_container,
    num_bytes_of,
)
from aserve.text.template_meter import Meters

STEPS_PER_CALL: Final = 40
STEPS_TO_SORT: Final = 32
"""An item, among many."""
MADE_PER_RENDERED: Final = 16
"""Bytes that a rendering may make and read, for each character that it may put out."""
SLOW_BYTES: Final = 64
"""What a character weighs for filters that go through a text in Python, or by a regular expression."""
CASE_BYTES: Final = 12
"""What a character may take while its case is changed: it may become three."""
STRING_BYTES: Final = 64
"""What a short string takes."""
MAX_WIDTH: Final = 999
MAX_NUMBER_CHARS: Final = 1000
"""Of a text that is read as a number, and of a format of a date."""

SCALAR_FILTERS: Final = "abs attr count d default first items last length round"
NUMBER_FILTERS: Final = "float int"
SEQUENCE_FILTERS: Final = "list map reject rejectattr reverse select selectattr"
SORTING_FILTERS: Final = "dictsort groupby max min sort unique"
TEXT_FILTERS: Final = "capitalize lower replace safe string trim truncate upper"
SLOW_TEXT_FILTERS: Final = "e escape indent title wordcount"
READING_TESTS: Final = """
    == != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in lower upper divisibleby even odd"""
"""Tests that go through what they test; the others look at its type."""
STR_METHODS: Final = """
    capitalize casefold count endswith find format index isalnum isalpha isdecimal isdigit islower isnumeric isspace
    istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip
    split splitlines startswith strip swapcase title upper"""
CASE_CHANGES: Final = frozenset({"capitalize", "casefold", "lower", "swapcase", "upper"})
METHODS: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset(STR_METHODS.split()),
    bytes: frozenset(),
    int: frozenset(),
    float: frozenset(),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
}
WIDE_PERCENT: Final = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{4})")
WIDE_BRACES: Final = re.compile(r":[^}]*(?:\{|\d{4})")
BLANKS: Final = " \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u2028\u2029\u3000"

Check = Callable[[str, tuple[Any, ...]], None]
"""Charges for a call that is about to be made: the function's name, its arguments."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates (`from_string`) and renders them, one at a time: a rendering holds the GIL anyway.

    max_chars: a rendering's length at most.
    """

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._budget = Budget(max_chars * MADE_PER_RENDERED)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._budget.weigh,
        )
        checks: dict[str, Check | None] = {
            SCALAR_FILTERS: None,
            NUMBER_FILTERS: self._check_number,
            SEQUENCE_FILTERS: self._check_items,
            SORTING_FILTERS: self._check_sorted,
            TEXT_FILTERS: self._check_texts,
            SLOW_TEXT_FILTERS: self._check_slow_texts,
        }
        known = self.filters
        self.filters = {
            name: self._metered(known[name], check) for names, check in checks.items() for name in names.split()
        }
        self.filters |= {"join": self._join, "tojson": self._tojson}
        self.filters |= {"_turns": self._turns, "_spread": self._spread}
        self.filters |= {"_weighed": self._budget.weigh, "_copied": self._budget.copy}
        tests: Mapping[str, Any] = self.tests
        self.tests |= {name: self._metered(tests[name], self._check_texts) for name in READING_TESTS.split()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_template(self, source: str) -> Template:
        """Raises `jinja2.TemplateSyntaxError`. Compiling evaluates constants, so it has a budget too."""
        with self._lock:
            self._budget.refill()
            return self.from_string(source)

    def render(self, template: Template, context: Mapping[str, Any], max_chars: int | None = None) -> str:
        """The template's text. Raises `TemplateLengthError` or `TemplateLimitError`, or whatever jinja2 raises for this
        context.
        """
        with self._lock:
            self._budget.refill()
            text = io.StringIO()
            max_chars = self._max_chars if max_chars is None else min(max_chars, self._max_chars)
            room = max_chars
            for chunk in template.generate(context):
                room -= len(chunk)
                if room < 0:
                    raise TemplateLengthError(max_chars)
                text.write(chunk)
            return text.getvalue()

    def variables(self, source: str) -> frozenset[str]:
        """Names that a template reads and does not define."""
        return frozenset(find_undeclared_variables(self.parse(source))) - self.globals.keys()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Jinja's own parser, and then meters."""
        tree = super()._parse(source, name, filename)
        Meters().visit(tree)
        return tree

    # What a template does

    def concat(self, chunks: Iterable[str]) -> str:
        """The text of a macro or a block, which Jinja gathers in pieces."""
        pieces = list(chunks)
        self._budget.spend(len(pieces), sum(map(num_bytes_of, pieces)))
        return "".join(pieces)

    def _turns(self, iterable: Iterable[Any], num_nodes: int) -> Iterable[Any]:
        if isinstance(iterable, Sized):
            self._budget.spend(len(iterable) * num_nodes)
            return iterable
        return self._counted(iterable, num_nodes)

    def _counted(self, iterable: Iterable[Any], num_nodes: int = 1) -> Iterator[Any]:
        for item in iterable:
            self._budget.spend(num_nodes)
            yield item

    def _spread(self, values: Any) -> Any:
        """Arguments, of which Python makes a tuple or dict of its own, and whom they are for perhaps another."""
        if isinstance(values, Sized):
            self._budget.spend(len(values), len(values) * STRING_BYTES)
            return values
        return self._counted(values, STEPS_TO_SORT)

    def _metered(self, function: Callable[..., Any], check: Check | None = None) -> Callable[..., Any]:
        @wraps(function)  # keeps jinja's mark for filters that take the environment or the context first
        def metered(*args: Any, **kwargs: Any) -> Any:
            self._budget.spend(STEPS_PER_CALL)
            if check is not None:
                check(function.__name__, (*args, *kwargs.values()))
            return self._budget.copy(function(*args, **kwargs))

        return metered

    def _check_number(self, _name: str, args: tuple[Any, ...]) -> None:
        """Text to number takes time by the square of its length."""
        if any(isinstance(arg, str) and len(arg) > MAX_NUMBER_CHARS for arg in args):
            raise TemplateLimitError(f"it reads a number of over {MAX_NUMBER_CHARS} characters")

    def _check_items(self, _name: str, args: tuple[Any, ...]) -> None:
        """Charge for what a filter reads item by item, and makes a list of."""
        for arg in args:
            if isinstance(arg, str):
                self._budget.spend(len(arg), len(arg) * ITEM_BYTES + (0 if arg.isascii() else len(arg) * STRING_BYTES))
            elif is_container(arg) or isinstance(arg, range):
                self._budget.spend(len(arg), 4 * len(arg) * ITEM_BYTES)

    def _check_sorted(self, name: str, args: tuple[Any, ...]) -> None:
        """Charge for what a filter compares."""
        self._check_items(name, args)
        self._budget.weigh(args[1:] if not is_container(args[0]) else args)
        self._budget.spend(STEPS_TO_SORT * sum(len(arg) for arg in args if is_container(arg) or isinstance(arg, range)))

    def _check_slow_texts(self, name: str, args: tuple[Any, ...]) -> None:
        self._budget.spend(1, SLOW_BYTES * sum(len(arg) for arg in args if isinstance(arg, str)))
        if name == "do_indent" and any(isinstance(arg, int) and arg > MAX_WIDTH for arg in args):
            raise SecurityError(f"indent takes at most {MAX_WIDTH}")
        if name == "do_indent":
            texts = [arg for arg in args if isinstance(arg, str)]
            self._budget.spend(1, sum(map(texts[0].count, "\n\r\v\f")) * (MAX_WIDTH if len(args) > 1 else 4))

    def _check_texts(self, name: str, args: tuple[Any, ...]) -> None:
        """Charge for what a filter, method or test reads, and for what it makes of it where that can be far more."""
        self._budget.weigh(args)
        texts = [arg for arg in args if isinstance(arg, str)]
        if name in ("replace", "do_replace") and len(texts) == 3:
            text, old, new = texts
            self._budget.spend(1, text.count(old) * 4 * len(new))
        elif name in ("split", "rsplit", "splitlines"):
            separators = texts[1:] or BLANKS
            self._budget.spend(1, STRING_BYTES * (1 + sum(texts[0].count(each) for each in separators if each)))
        elif name == "title":
            self._check_slow_texts(name, args)
        elif name.removeprefix("do_") in CASE_CHANGES and not texts[0].isascii():
            self._budget.spend(1, CASE_BYTES * len(texts[0]))

    def _join(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        items = list(self._turns(values, 1))
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        self._budget.spend(STEPS_PER_CALL, len(items) * num_bytes_of(d))
        return d.join(map(str, self._budget.weigh(items)))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """As transformers defines it: unlike Jinja's own, no HTML escapes, and keys in their order."""
        if indent is not None and indent > MAX_WIDTH:
            raise SecurityError(f"tojson takes an indent of at most {MAX_WIDTH}")
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self._budget.weigh(value)
        if indent is None:
            return str(self._budget.copy(encoder.encode(value)))
        pieces = []
        for piece in encoder.iterencode(value):
            self._budget.spend(1, STRING_BYTES + 2 * len(piece))  # the piece, and its part of the whole
            pieces.append(piece)
        return "".join(pieces)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in a template: its steps, and what it makes."""
        self._budget.spend(STEPS_PER_CALL)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            if obj.__name__ == "join":
                return self._join(args[0], owner)
            self._check_texts(obj.__name__, (owner, *args))
        elif is_container(owner):
            self._budget.weigh(owner if obj.__name__ in ("count", "index") else args)
            self._budget.copy(owner)
        elif obj is dict:
            self._budget.spend(1, STRING_BYTES * sum(len(arg) for arg in args if is_container(arg)))
            self._budget.weigh(args)
        return self._budget.copy(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator in a template: what it makes, charged before it is made."""
        if operator == "**":
            raise SecurityError("powers are not available to chat templates")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            self._budget.check_int(sum(bits) if operator == "*" else max(bits) + 1)
        elif operator == "*":
            self._check_repeated(left, right)
            self._check_repeated(right, left)
        elif operator == "%" and isinstance(left, str):
            _refuse(WIDE_PERCENT, left)
            self._check_formatted(left, left.count("%"), right)
        else:
            self._budget.copy(left)
            self._budget.copy(right)
        return super().call_binop(context, operator, left, right)

    def _check_repeated(self, value: Any, times: Any) -> None:
        if is_container(value) and isinstance(times, int):
            self._budget.spend(1, num_bytes_of(value) * max(times, 0))

    def _check_formatted(self, text: str, num_fields: int, values: Any) -> None:
        """Charge for a format: each field may be any of the values, and have a width."""
        self._budget.copy(text)
        for _ in range(max(num_fields, 1)):
            self._budget.weigh(values)
        self._budget.spend(1, num_fields * (MAX_WIDTH if any(map(str.isdigit, text)) else 1))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format in the sandbox, without widths that cannot be foreseen."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text = value.__self__
        _refuse(WIDE_BRACES, text)
        return self._metered(wrapped, lambda _name, args: self._check_formatted(text, text.count("{"), args))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Of Python's own types only the methods listed above."""
        for kind, methods in METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}, by which training code finds the assistant's text: just its body."""

    tags = {"generation"}  # noqa: RUF012  as its base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > MAX_NUMBER_CHARS:
        raise SecurityError(f"a format of a date has at most {MAX_NUMBER_CHARS} characters")
    return datetime.datetime.now().strftime(format)


def _refuse(pattern: re.Pattern[str], text: str) -> None:
    if pattern.search(text):
        raise SecurityError("widths in formats are not available to chat templates")

"""TemplateSandbox: a Jinja environment like transformers', with a budget for what a template may cost.

Templates come with checkpoints and are not to be trusted. Jinja's sandbox keeps them from reaching Python; this one
also gives each rendering a budget of steps (turns of loops, calls, filters) and of characters (every string or list
that it makes), and leaves out what no chat template needs and a budget cannot foresee: powers, padding, widths in
formats, recursive loops, and the filters and methods not listed here. Knows nothing of messages.
"""

import datetime
import json
import re
import threading
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, Sized, ValuesView
from functools import wraps
from typing import Any, Final, NoReturn, TypeGuard

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS: Final = 1_000_000
STEPS_PER_CALL: Final = 4
MADE_PER_RENDERED: Final = 16
"""Characters that a rendering may make on the way, for each that it may put out."""
ITEM_CHARS: Final = 8
"""What an item of a list weighs beside its text, once the list becomes text."""
MAX_WIDTH: Final = 999

SCALAR_FILTERS: Final = "abs attr count d default first float int items last length round"
SEQUENCE_FILTERS: Final = """
    dictsort groupby list map max min reject rejectattr reverse select selectattr sort unique"""
TEXT_FILTERS: Final = "capitalize e escape indent lower replace safe string title trim truncate upper wordcount"
STR_METHODS: Final = """
    capitalize casefold count endswith find format index isalnum isalpha isdecimal isdigit islower isnumeric isspace
    istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip
    split splitlines startswith strip swapcase title upper"""
METHODS: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset(STR_METHODS.split()),
    bytes: frozenset(),
    int: frozenset(),
    float: frozenset(),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
}
CONTAINERS: Final = (str, list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView)
WIDE_PERCENT: Final = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{4})")
WIDE_BRACES: Final = re.compile(r":[^}]*(?:\{|\d{4})")

Check = Callable[[str, tuple[Any, ...]], None]
"""Charges for a call that is about to be made: the function's name, its arguments."""


class TemplateLimitError(TemplateError):
    """A rendering ran out of its budget."""


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates (`from_string`) and renders them, one at a time: a rendering holds the GIL anyway.

    max_chars: a rendering's length at most.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, max_chars: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self._weighed,
        )
        self._max_chars = max_chars
        self._lock = threading.Lock()
        self._steps_left = 0
        self._chars_left = 0
        known = self.filters
        self.filters = {name: self._metered(known[name]) for name in SCALAR_FILTERS.split()}
        self.filters |= {name: self._metered(known[name], self._check_items) for name in SEQUENCE_FILTERS.split()}
        self.filters |= {name: self._metered(known[name], self._check_texts) for name in TEXT_FILTERS.split()}
        self.filters |= {"join": self._join, "tojson": self._tojson, "_turns": self._turns, "_weighed": self._weighed}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def compile_template(self, source: str) -> Template:
        """Raises `jinja2.TemplateSyntaxError`. Compiling evaluates constants, so it has a budget too."""
        with self._lock:
            self._refill()
            return self.from_string(source)

    def render(self, template: Template, context: Mapping[str, Any]) -> str:
        """The template's text. Raises `TemplateLimitError`, or whatever jinja2 raises for this context."""
        with self._lock:
            self._refill()
            chunks: list[str] = []
            room = self._max_chars
            for chunk in template.generate(context):
                room -= len(chunk)
                if room < 0:
                    raise TemplateLimitError(f"it renders to over {self._max_chars} characters")
                chunks.append(chunk)
            return "".join(chunks)

    def variables(self, source: str) -> frozenset[str]:
        """Names that a template reads and does not define."""
        return frozenset(find_undeclared_variables(self.parse(source))) - self.globals.keys()

    # The budget

    def _refill(self) -> None:
        self._steps_left = MAX_STEPS
        self._chars_left = self._max_chars * MADE_PER_RENDERED

    def _spend_steps(self, num_steps: int) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise TemplateLimitError(f"it takes over {MAX_STEPS} steps")

    def _spend_chars(self, num_chars: int) -> None:
        self._chars_left -= num_chars
        if self._chars_left < 0:
            raise TemplateLimitError(f"it makes over {self._max_chars * MADE_PER_RENDERED} characters on the way")

    def _made(self, value: Any) -> Any:
        if _is_container(value):
            self._spend_chars(len(value))
        return value

    def _weighed(self, value: Any) -> Any:
        """Charge for the text that a value will become, however often it holds the same thing."""
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                self._spend_chars(len(item))
            elif _is_container(item):
                self._spend_steps(len(item))
                self._spend_chars(len(item) * ITEM_CHARS)
                stack.extend(item)
                stack.extend(item.values() if isinstance(item, dict) else ())
        return value

    # What a template does

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Jinja's own parser, and then a meter on every loop and every `~`, which nothing else can intercept."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            if loop.recursive:
                raise TemplateSyntaxError("recursive loops are not available to chat templates", loop.lineno)
            loop.iter = nodes.Filter(loop.iter, "_turns", [], [], None, None, lineno=loop.lineno)
        for concat in tree.find_all(nodes.Concat):
            concat.nodes = [
                nodes.Filter(node, "_weighed", [], [], None, None, lineno=concat.lineno) for node in concat.nodes
            ]
        return tree

    def concat(self, chunks: Iterable[str]) -> str:
        """The text of a macro or a block, which Jinja gathers in pieces."""
        pieces = list(chunks)
        self._spend_chars(sum(map(len, pieces)))
        return "".join(pieces)

    def _turns(self, iterable: Iterable[Any]) -> Iterable[Any]:
        if isinstance(iterable, Sized):
            self._spend_steps(len(iterable))
            return iterable
        return self._counted(iterable)

    def _counted(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self._spend_steps(1)
            yield item

    def _metered(self, function: Callable[..., Any], check: Check | None = None) -> Callable[..., Any]:
        @wraps(function)  # keeps jinja's mark for filters that take the environment or the context first
        def metered(*args: Any, **kwargs: Any) -> Any:
            self._spend_steps(STEPS_PER_CALL)
            if check is not None:
                check(function.__name__, (*args, *kwargs.values()))
            return self._made(function(*args, **kwargs))

        return metered

    def _check_items(self, _name: str, args: tuple[Any, ...]) -> None:
        """Charge for what a filter reads item by item."""
        self._spend_steps(sum(len(arg) for arg in args if isinstance(arg, Sized) and not isinstance(arg, str)))

    def _check_texts(self, name: str, args: tuple[Any, ...]) -> None:
        """Charge for what a filter or method reads as text; replace and indent can make far more than they read."""
        self._weighed(args)
        texts = [arg for arg in args if isinstance(arg, str)]
        if name in ("replace", "do_replace") and len(texts) == 3:
            text, old, new = texts
            self._spend_chars(text.count(old) * len(new))
        if name == "do_indent" and any(isinstance(arg, int) and arg > MAX_WIDTH for arg in args):
            raise SecurityError(f"indent takes at most {MAX_WIDTH}")

    def _join(self, values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        items = list(self._turns(values))
        if attribute is not None:
            items = [self.getitem(item, attribute) for item in items]
        self._spend_chars(len(items) * len(d))
        return d.join(map(str, self._weighed(items)))

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
        text = json.dumps(
            self._weighed(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        return str(self._made(text))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in a template: its steps, and what it makes."""
        self._spend_steps(STEPS_PER_CALL)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            if obj.__name__ == "join":
                return self._join(args[0], owner)
            self._check_texts(obj.__name__, (owner, *args))
        return self._made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator in a template: what it makes, charged before it is made where it can multiply."""
        if operator == "**":
            raise SecurityError("powers are not available to chat templates")
        if operator == "*":
            self._check_product(left, right)
        if operator == "%" and isinstance(left, str):
            _refuse(WIDE_PERCENT, left)
            self._weighed(right)
        return self._made(super().call_binop(context, operator, left, right))

    def _check_product(self, left: Any, right: Any) -> None:
        for value, times in ((left, right), (right, left)):
            if _is_container(value) and isinstance(times, int):
                self._spend_chars(len(value) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            self._spend_chars(left.bit_length() + right.bit_length())

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format in the sandbox, without widths that cannot be foreseen."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        _refuse(WIDE_BRACES, value.__self__)
        return self._metered(wrapped, self._check_texts)

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


def _is_container(value: Any) -> TypeGuard[Collection[Any]]:
    return isinstance(value, CONTAINERS)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _refuse(pattern: re.Pattern[str], text: str) -> None:
    if pattern.search(text):
        raise SecurityError("widths in formats are not available to chat templates")

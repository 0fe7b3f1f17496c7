"""Small wrong changes to a Python file, one at a time: what a test suite has to notice.

Each mutant is one node of the syntax tree, exchanged for another and written into the text where the old one stood, so
that all other lines stay as they are. Kinds, by DeMillo, Lipton and Sayward, "Hints on test data selection" (1978), and
the operators that mutmut and Cosmic Ray have:

    comparison   a < b -> a <= b        a == b -> a != b        a in b -> a not in b      a is b -> a is not b
    arithmetic   a + b -> a - b         a // b -> a * b         min(a, b) -> max(a, b)
    logic        a and b -> a or b      not a -> a              if a: -> if not a:
    constant     3 -> 4                 0.5 -> 1.5              True -> False
    removal      call(...)  x.a = b  x[a] = b  x += a  del x  raise ...  -> pass
    arguments    f(a, b) -> f(b, a)

Left alone: asserts and what they compare (bugs of ours, by design not reached), `__repr__`, annotations, decorators,
texts, `if TYPE_CHECKING:`, `__slots__`, and figures that are named at the top of a module (a limit of 1024 is a
choice, of which no test can say that 1025 is wrong).
"""

import ast
import copy
from collections.abc import Iterator
from typing import Final, NamedTuple

COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}
NAMES: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
HAVE_OPPOSITES: Final = (ast.Compare, ast.UnaryOp, ast.Constant)
"""Conditions whose opposite is another mutant already, or which are no question."""
COMMUTATIVE: Final = ("min", "max", "minimum", "maximum")
UNCHANGED_FIELDS: Final = ("decorator_list", "annotation", "returns")

Change = tuple[str, ast.expr | ast.stmt, ast.AST]


class Mutant(NamedTuple):
    """line: from 1. begin, end: in bytes of the file. old, new: what stands there, and what takes its place."""

    line: int
    kind: str
    begin: int
    end: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        """The file's text with this change."""
        text = source.encode()
        return (text[: self.begin] + self.new.encode() + text[self.end :]).decode()


def mutants_of(source: str) -> list[Mutant]:
    """Every mutant of a file's text, in the order of its lines."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node in _walk(ast.parse(source)):
        for kind, place, changed in _changes(node):
            assert place.end_lineno is not None
            assert place.end_col_offset is not None
            begin = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            old = source.encode()[begin:end].decode()
            found.append(Mutant(place.lineno, kind, begin, end, old, _text(changed)))
    return sorted(found, key=lambda mutant: (mutant.begin, mutant.end, mutant.new))


def _text(node: ast.AST) -> str:
    """A node as it may stand anywhere: in parentheses, where its neighbours could bind closer."""
    text = ast.unparse(node)
    return text if isinstance(node, ast.Name | ast.Constant | ast.Pass) else f"({text})"


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below this one that may change."""
    for name, field in ast.iter_fields(node):
        if name in UNCHANGED_FIELDS or (name == "keywords" and isinstance(node, ast.ClassDef)):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and not _is_left_alone(child, is_top=isinstance(node, ast.Module)):
                yield child
                yield from _walk(child)


def _is_left_alone(node: ast.AST, *, is_top: bool) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.FunctionDef(name="__repr__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assign(targets=[ast.Name(id="__slots__")]):
            return True
        case ast.Assign() | ast.AnnAssign():
            return is_top
    return False


def _changes(node: ast.AST) -> Iterator[Change]:
    """Kinds of mutants of a node, the place of each, and what is put there."""
    match node:
        case ast.Constant(value=bool() as value):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield "constant", node, ast.Constant(value + 1 if value + 1 != value else 2 * value)
        case ast.Call(func=func, args=[first, second, *rest]) if _may_swap(func, first, second):
            yield "arguments", node, _with(node, args=[second, first, *rest])
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(test, HAVE_OPPOSITES):
            yield "logic", test, ast.UnaryOp(ast.Not(), test)
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Delete() | ast.Raise() if _may_go(node):
            yield "removal", node, ast.Pass()
        case _:
            yield from _changed_operators(node)


def _changed_operators(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=[op]):
            yield "comparison", node, _with(node, ops=[COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not _is_text(node):
            yield "arithmetic", node, _with(node, op=ARITHMETIC[type(op)]())
        case ast.Name(id=name) if name in NAMES:
            yield "arithmetic", node, _with(node, id=NAMES[name])
        case ast.BoolOp(op=op):
            yield "logic", node, _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "logic", node, operand


def _is_text(node: ast.BinOp) -> bool:
    """Texts put together."""
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes))
        for side in (node.left, node.right)
    )


def _may_swap(func: ast.expr, first: ast.expr, second: ast.expr) -> bool:
    """Whether the order of two arguments matters."""
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    is_starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
    return not is_starred and name not in COMMUTATIVE and ast.dump(first) != ast.dump(second)


def _may_go(node: ast.stmt) -> bool:
    """Whether a statement can go without its names being missed: no docstring, and no variable that others read."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    return True


def _with(node: ast.AST, **fields: object) -> ast.AST:
    """A copy of a node with other fields."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed

"""Meters in a template's syntax tree, where Jinja lets nobody in between: around operands, literals, slices, and loops.

    {% for x in xs %}    xs | _turns(nodes in the loop)      a == b, a in b    a | _weighed == b | _weighed
    f(*xs)               f(*(xs | _spread))                  [a, b]            [a, b] | _weighed
    xs[1:]               (xs | _copied)[1:]                  a ~ b             a | _weighed ~ b | _weighed

So that no value is made, or gone through, that is larger than what is left of the budget.
"""

from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

Literal = TypeVar("Literal", nodes.List, nodes.Tuple, nodes.Dict)


class Meters(NodeTransformer):
    """`visit(tree)` puts them in. Raises `TemplateSyntaxError` for recursive loops, whose turns nothing can count."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """Charge for all turns when they begin, by what is in the loop."""
        if node.recursive:
            raise TemplateSyntaxError("recursive loops are not available to chat templates", node.lineno)
        num_nodes = 1 + sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        node.iter = _metered(node.iter, "_turns", nodes.Const(num_nodes, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        """Charge for the operands of ~."""
        self.generic_visit(node)
        node.nodes = [_weighed(operand) for operand in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """Charge for what is compared, or searched. With a constant nothing is compared for longer than that is."""
        self.generic_visit(node)
        left = node.expr
        for operand in node.ops:
            if not _is_constant(operand.expr) and (operand.op in ("in", "notin") or not _is_constant(left)):
                node.expr = _weighed(node.expr)
                operand.expr = _weighed(operand.expr)
            left = operand.expr
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        """Charge for what is sliced."""
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _metered(node.node, "_copied")
        else:
            node.arg = _weighed(node.arg)  # a key is hashed
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Call:
        """Charge for arguments that are spread."""
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = _metered(node.dyn_args, "_spread")
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = _metered(node.dyn_kwargs, "_spread")
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        """Charge for what it holds."""
        return self._literal(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        """Charge for what it holds, unless it is what is assigned to."""
        if node.ctx != "load":
            return node
        return self._literal(node, node.items)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        """Charge for what it holds. Its keys are weighed before they are hashed."""
        for pair in node.items:
            pair.key = _weighed(self.visit(pair.key))
        return self._literal(node, [pair.value for pair in node.items])

    def _literal(self, node: nodes.Expr, values: list[nodes.Expr]) -> nodes.Expr:
        self.generic_visit(node)
        return node if all(map(_is_constant, values)) else _weighed(node)


def _is_constant(node: nodes.Expr) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(map(_is_constant, node.items))
    return isinstance(node, nodes.Const)


def _weighed(node: nodes.Expr) -> nodes.Expr:
    is_small = _is_constant(node) or isinstance(node, nodes.Compare | nodes.Test | nodes.Not)
    return node if is_small else _metered(node, "_weighed")


def _metered(node: Any, meter: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, meter, list(arguments), [], None, None, lineno=node.lineno)

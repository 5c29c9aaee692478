"""Renders small prompts in the router's process, for chat templates that use only operations of known cost.

`is_cheap` admits a template by its syntax: constant literals, and only allowed filters and tests. While it renders,
each loop iteration, macro call and produced string is charged to a small budget (`cheap_costs`); where the result can
be larger than the operands, before it is made. Lists and objects come from the variables alone, are never combined, and
the caller keeps them small. So a rendering takes milliseconds, or it raises Costly, and a child process renders the
prompt."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.visitor import NodeTransformer

from kvferry.model_files.template_language import environment
from kvferry.model_files.template_sandbox import COUNTED, QUEUE_METHODS, Sandbox
from kvferry.router.text.cheap_costs import (
    CHARS_A_UNIT,
    FILTERS,
    GUARDS,
    SCALAR,
    SEARCHED,
    SLICED,
    SPENT,
    SmallBudget,
    charge_call,
    charge_operator,
    charged,
    spend,
)

MAX_SOURCE = 2**18
"""Longest source of a cheap template, in characters."""
_SYNTAX = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock, nodes.Macro,
    nodes.Break, nodes.Continue, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair,
    nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.Getattr,
    nodes.Getitem, nodes.Slice, nodes.Keyword, nodes.Filter, nodes.Test, nodes.Call, nodes.Concat, nodes.Add, nodes.Sub,
    nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod,
)  # fmt: skip
_TESTS = frozenset((
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "boolean", "true", "false", "number",
    "integer", "float",
))  # fmt: skip
_HIDDEN = frozenset(("varargs", "kwargs", "caller", "self"))
"""Names that Jinja defines inside a macro."""


def is_cheap(tree: nodes.Template, source: str) -> bool:
    """Return whether a template, as Jinja parses it, uses only operations whose cost CheapSandbox knows."""
    return len(source) <= MAX_SOURCE and all(map(_known, (tree, *tree.find_all(nodes.Node))))


def cheap_environment() -> CheapSandbox:
    """Return an environment that renders chat templates and charges their operations."""
    made = environment(CheapSandbox)
    made.filters |= {name: charged(made.filters[name], cost) for name, cost in FILTERS.items()}
    made.filters |= GUARDS
    return made


class CheapSandbox(Sandbox):
    """Environment of cheap templates; their rendering raises Costly where its cost is not known or too high."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%"))
    budget = SmallBudget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Charging().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge an operator, then apply it (Jinja hook)."""
        charge_operator(context, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Charge a call and what it returns (Jinja hook)."""
        charge_call(__context, __obj, args)
        found = super().call(__context, __obj, *args, **kwargs)
        spend(__context, len(found) if isinstance(found, str) else 0)
        return found


def _known(node: nodes.Node) -> bool:
    match node:
        case nodes.Filter(name=name):
            return node.node is not None and name in FILTERS and not (node.dyn_args or node.dyn_kwargs)
        case nodes.Test(name=name):
            return name in _TESTS and not (node.dyn_args or node.dyn_kwargs)
        case nodes.Call():
            return not (node.dyn_args or node.dyn_kwargs)
        case nodes.For(recursive=True):
            return False
        case nodes.AssignBlock():
            return node.filter is None
        case nodes.List() | nodes.Dict():
            return _constant(node)
        case nodes.Tuple(ctx=ctx):
            return ctx == "store" or _constant(node)
        case nodes.Name(name=name):
            return name not in _HIDDEN
        case nodes.Getattr(attr=name):
            return name not in QUEUE_METHODS
    return type(node) in _SYNTAX


def _constant(node: nodes.Node) -> bool:
    """Return whether a node is a constant or a literal of constants."""
    if isinstance(node, nodes.List | nodes.Tuple | nodes.Dict | nodes.Pair):
        return all(map(_constant, node.iter_child_nodes()))
    return isinstance(node, nodes.Const)


class _Charging(NodeTransformer):
    """Rewrites what the sandbox has parsed, so that loops, macros, outputs, comparisons and slices are charged."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Filter)
        assert node.iter.name == COUNTED
        node.iter.args = [nodes.Const(_weight(node))]
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_guarded(nodes.Const(_weight(node)), SPENT)))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        node.nodes = [each if isinstance(each, nodes.TemplateData) else _guarded(each, SCALAR) for each in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _guarded(node, SLICED) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """Guard the sides of a comparison, unless one of two sides is a constant, which bounds the cost."""
        self.generic_visit(node)
        first, searches = node.ops[0], [each.op in ("in", "notin") for each in node.ops]
        if len(node.ops) == 1 and (_constant(first.expr) or (_constant(node.expr) and not searches[0])):
            return node
        node.expr = _guarded(node.expr, SCALAR)
        for operand, searched in zip(node.ops, searches, strict=True):
            operand.expr = _guarded(operand.expr, SEARCHED if searched else SCALAR)
        return node


def _guarded(node: nodes.Expr, guard: str) -> nodes.Filter:
    return nodes.Filter(node, guard, [], [], None, None)


def _weight(node: nodes.Node) -> int:
    """Return the cost of one turn or call: its nodes and its constant text, in units."""
    inner = list(node.find_all(nodes.Node))
    return (
        1 + len(inner) + sum(len(each.data) for each in inner if isinstance(each, nodes.TemplateData)) // CHARS_A_UNIT
    )

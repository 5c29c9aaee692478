"""Sandbox for chat templates, which are programs from a model's files.

Jinja's own sandbox protects the process's objects. This one also bounds loops and the size of texts."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.environment import Template
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_TURNS = 500_000
"""Budget of one rendering: loop turns, calls, and each 8 KiB of a text or list that an operation makes."""
MAX_LENGTH = 1 << 24
"""Maximum length of a text or list that an operation may make, in characters or items."""
MAX_NUMBER = 1 << 20
"""Maximum number passed to a filter or method, which may be a width or a count."""
_BYTES_A_TURN = 8192
_WIDTH = re.compile(r"\d{6}|\*")
BUDGET, COUNTED, CONCATENATED = "kvferry budget", "kvferry counted", "kvferry concatenated"
OWN_LIST = "kvferry own list"
"""Names that no template can write: a variable and three filters."""
QUEUE_METHODS = frozenset(("append", "pop"))
"""Methods with which templates keep queues, such as of the ids of calls that wait for results."""


class Budget:
    """Remaining budget of one rendering."""

    def __init__(self, turns: int = MAX_TURNS) -> None:
        self.left = turns

    def spend(self, turns: int) -> None:
        """Spend turns; raise TemplateError if none are left."""
        self.left -= turns
        if self.left < 0:
            self.spent()

    def spent(self) -> None:
        """Raise the error of a budget that is spent."""
        raise TemplateError(f"it runs more than {MAX_TURNS} loop iterations")


class OwnList(list[Any]):
    """List that a template begins empty: it may change it, unlike the lists of its variables."""


class _BoundedTemplate(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        """Render with a budget of its own."""
        assert isinstance(self.environment, Sandbox)
        return super().render(*args, **{**kwargs, BUDGET: self.environment.budget()})


class Sandbox(ImmutableSandboxedEnvironment):
    """Sandboxed Jinja environment that raises TemplateError beyond its bounds."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    template_class = _BoundedTemplate
    budget: type[Budget] = Budget

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _bounded(each) for name, each in self.filters.items()}
        self.filters |= {COUNTED: _counted, CONCATENATED: _concatenated, OWN_LIST: OwnList}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounding().visit(super()._parse(source, name, filename))
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute (Jinja hook)."""
        if isinstance(obj, OwnList) and attr in QUEUE_METHODS:
            return True
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Check the size of an operator's result, then apply it (Jinja hook)."""
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        elif operator == "**":
            _check_numbers((left, right))
            if isinstance(right, int) and right > 64:
                raise TemplateError(f"an exponent of {right} is too large")
        elif operator == "*":
            _spend(context, max(_times(left, right), _times(right, left)))
        elif operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
            _spend(context, len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Check a call's arguments and the size of its result (Jinja hook)."""
        _check_numbers((*args, *kwargs.values()))
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _check_call(text, __obj.__name__, args)
        if isinstance(__obj, LoopContext):  # a recursive loop, called with its items
            args = (_counted(__context, args[0]), *args[1:]) if args else args
        found = super().call(__context, __obj, *args, **kwargs)
        _spend(__context, len(found) if isinstance(found, str) else 0)
        return found

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Check the widths of a format string (Jinja hook)."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_widths(value.__self__)
        return wrapped


class _Bounding(NodeTransformer):
    """Rewrites a template so that loops count their turns, `a ~ b` checks its length, and `[]` can grow."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, COUNTED, [], [], None, None)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return node if node.items else nodes.Filter(node, OWN_LIST, [], [], None, None)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), CONCATENATED, [], [], None, None)


def _spend(context: Context, length: int) -> None:
    """Spend one turn, and those of a text or list of that length."""
    if length > MAX_LENGTH:
        raise TemplateError(f"a string or list of {length} parts is too long; the limit is {MAX_LENGTH}")
    budget = context.get(BUDGET)
    if budget is not None:
        budget.spend(1 + length // _BYTES_A_TURN)


@pass_context
def _counted(context: Context, items: Any) -> Any:
    """Return the items of a loop, each of which spends a turn."""
    return _turning(context, items) if isinstance(items, Iterable) else items


def _turning(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend(context, 0)
        yield item


@pass_context
def _concatenated(context: Context, parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    _spend(context, sum(map(len, texts)))
    return "".join(texts)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with checks of its arguments, which follow the arguments of Jinja and the value."""
    before = 1 + hasattr(function, "jinja_pass_arg")

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers((*args[before:], *kwargs.values()))
        if len(args) >= before and isinstance(args[before - 1], str | list):
            _check_call(args[before - 1], function.__name__.removeprefix("do_").removeprefix("sync_do_"), args[before:])
        return function(*args, **kwargs)

    return bounded


def _check_call(value: str | list[Any], name: str, args: Sequence[Any]) -> None:
    """Raise TemplateError if a method or filter would make a string that is too long."""
    if name == "format" and isinstance(value, str):
        _check_widths(value)
        return
    lengths = [len(each) for each in args if isinstance(each, Sequence)]
    made = 0
    if name == "replace" and len(args) > 1 and isinstance(value, str):
        made = value.count(str(args[0])) * len(str(args[1]))
    elif name in ("join", "indent", "expandtabs") and lengths:
        made = len(value) * max(lengths)
    if made > 4 * MAX_LENGTH:
        raise TemplateError(f"{name} would make a string that is too long; the limit is {MAX_LENGTH}")


def _check_widths(form: str) -> None:
    if _WIDTH.search(form):
        raise TemplateError("a format's width is too large")


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise TemplateError(f"a number is too large; the limit is {MAX_NUMBER}")


def _times(value: Any, times: Any) -> int:
    """Return the length of `value` when repeated."""
    return len(value) * max(0, times) if isinstance(times, int) and isinstance(value, Sequence) else 0

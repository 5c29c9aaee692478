"""Cost accounting of cheap templates: charges each Jinja operation to a budget before it can take long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import Any

from jinja2 import Undefined, pass_context
from jinja2.runtime import Context, Macro
from jinja2.utils import Namespace, _PassArg

from kvferry.model_files.template_language import raise_exception, strftime_now
from kvferry.model_files.template_sandbox import BUDGET, CONCATENATED, COUNTED, OWN_LIST, Budget

MAX_UNITS = 30_000
"""Budget of one rendering, in nodes of a template's syntax: tens of milliseconds at most."""
CHARS_A_UNIT = 64
"""Characters of a text that cost as much as one node."""
_CHARS_A_PIECE = 4
"""The same for texts that are split into parts or joined from them."""
_MAX_NUMBER = 2**63
_MAX_OPTION = 64
"""Longest argument that multiplies the cost of an operation, in characters."""
_MAX_INDENT = 8
SCALAR, SEARCHED, SLICED, SPENT = "kvferry scalar", "kvferry searched", "kvferry sliced", "kvferry spent"
"""Names of guards, which are filters that no template can write."""

Args = tuple[Any, ...]


class Costly(Exception):
    """An operation has an unknown cost, or a rendering exceeds the budget of the router's own process."""


class SmallBudget(Budget):
    """Budget of a rendering in the router's process."""

    def __init__(self) -> None:
        super().__init__(MAX_UNITS)

    def spent(self) -> None:
        """Raise Costly."""
        raise Costly


def spend(context: Context, chars: int, chars_a_unit: int = CHARS_A_UNIT) -> None:
    """Spend one unit, and those of a text of `chars` characters."""
    context[BUDGET].spend(1 + chars // chars_a_unit)


def _length(value: Any) -> int:
    """Return the length of a text, 1 for other scalars; raise Costly for values whose text takes long to make."""
    if isinstance(value, str):
        return len(value)
    if value is None or isinstance(value, bool | int | float | Undefined):
        return 1
    raise Costly


def charge_operator(context: Context, operator: str, left: Any, right: Any) -> None:
    """Charge an operator with two small numbers, or an addition of texts; raise Costly for all others."""
    if isinstance(left, int | float) and isinstance(right, int | float):
        if max(abs(left), abs(right)) > _MAX_NUMBER:
            raise Costly
    elif operator == "+" and type(left) is type(right) is str:
        spend(context, len(left) + len(right))
    else:
        raise Costly


def charge_call(context: Context, called: Any, args: Args) -> None:
    """Charge the call of a macro, of a method of a text or object, or of a few functions; else raise Costly."""
    if isinstance(called, Macro) or called is raise_exception or (called is Namespace and not args):
        return
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if type(owner) is str and name in _METHODS:
        _METHODS[name](context, owner, args)
    elif called is strftime_now or called is context.environment.globals["range"]:
        if sum(map(_length, args)) > _MAX_OPTION:
            raise Costly
    elif not (type(owner) is dict and name in ("get", "items", "keys", "values")):
        raise Costly


def charged(function: Callable[..., Any], cost: Callable[[Context, Any, Args], None]) -> Callable[..., Any]:
    """Wrap a filter with its cost, and with that of the text it returns."""
    passed = _PassArg.from_obj(function)
    assert passed in (None, _PassArg.eval_context)

    @pass_context
    def charging(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        cost(context, value, (*args, *kwargs.values()))
        before = (context.eval_ctx,) if passed is _PassArg.eval_context else ()
        found = function(*before, value, *args, **kwargs)
        spend(context, len(found) if isinstance(found, str) else 0, _CHARS_A_PIECE if cost is _json else CHARS_A_UNIT)
        return found

    return charging


def _free(context: Context, value: Any, args: Args) -> None:
    spend(context, 0)


def _text(context: Context, value: Any, args: Args) -> None:
    """Charge a pass over a text, whose arguments are compared at its start or end, or with each character."""
    if sum(map(_length, args)) > _MAX_OPTION:
        raise Costly
    spend(context, _length(value))


def _split(context: Context, value: str, args: Args) -> None:
    spend(context, len(value), _CHARS_A_PIECE)


def _replace(context: Context, value: Any, args: Args) -> None:
    if len(args) != 2 or not all(type(each) is str for each in (value, *args)):
        raise Costly
    spend(context, len(value) + value.count(args[0]) * len(args[1]))


def _join(context: Context, value: Any, args: Args) -> None:
    if type(value) is not list or len(args) > 1:
        raise Costly
    spend(context, sum(map(_length, value)) + len(value) * sum(map(_length, args)), _CHARS_A_PIECE)


def _json(context: Context, value: Any, args: Args) -> None:
    """Charge nothing yet: the variables bound the text of a value, if its options add little to each part."""
    for option in args:
        if isinstance(option, tuple):
            if sum(map(_length, option)) > _MAX_INDENT:
                raise Costly
        elif _length(option) > 1 or (isinstance(option, int) and option > _MAX_INDENT):
            raise Costly


_PASSES = ("startswith", "endswith", "strip", "lstrip", "rstrip", "lower", "upper", "title", "capitalize")
_METHODS = MappingProxyType({
    **dict.fromkeys(_PASSES, _text),
    "split": _split,
    "replace": _replace,
})  # fmt: skip
FILTERS = MappingProxyType(
    {
        **dict.fromkeys(("trim", "string", "safe", "lower", "upper", "capitalize"), _text),
        **dict.fromkeys(("length", "count", "default", "d", "items"), _free),
        "replace": _replace,
        "join": _join,
        "tojson": _json,
    }
)
"""Filters of cheap templates and their costs."""


@pass_context
def _scalar(context: Context, value: Any) -> Any:
    spend(context, _length(value))
    return value


@pass_context
def _searched(context: Context, value: Any) -> Any:
    """Charge a search in a text, list or object; the sought value is a scalar."""
    if isinstance(value, str):
        spend(context, len(value))
    elif type(value) in (list, tuple):
        spend(context, len(value), 1)
    elif type(value) is not dict:
        raise Costly
    return value


@pass_context
def _sliced(context: Context, value: Any) -> Any:
    spend(context, len(value) if isinstance(value, str | list | tuple) else 0, _CHARS_A_PIECE)
    return value


@pass_context
def _spent(context: Context, units: int) -> None:
    context[BUDGET].spend(units)


@pass_context
def _counted(context: Context, items: Any, weight: int) -> Any:
    return _turning(context, items, weight) if isinstance(items, Iterable) else items


def _turning(context: Context, items: Iterable[Any], weight: int) -> Iterator[Any]:
    for item in items:
        context[BUDGET].spend(weight)
        yield item


@pass_context
def _concatenated(context: Context, parts: list[Any]) -> str:
    spend(context, sum(map(_length, parts)))
    return "".join(map(str, parts))


GUARDS: dict[str, Callable[..., Any]] = {
    SCALAR: _scalar, SEARCHED: _searched, SLICED: _sliced, SPENT: _spent, COUNTED: _counted,
    CONCATENATED: _concatenated, OWN_LIST: list,
}  # fmt: skip
"""Filters that `cheap_templates` writes into a template."""

"""Jinja environment with the dialect of chat templates, as transformers defines it; imports nothing large."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser


class _Generation(Extension):
    """Prints the body of `{% generation %}…{% endgeneration %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


AnyEnvironment = TypeVar("AnyEnvironment", bound=Environment)


def environment(kind: type[AnyEnvironment]) -> AnyEnvironment:
    """Return an environment of this kind that understands chat templates."""
    made = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON without the HTML escapes of Jinja's own filter, on which no model was trained."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> list[Any]:
    """Return the items that filters such as `map` yield one by one, which transformers refuses to encode."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"an object of type {type(value).__name__} cannot be written as JSON")


def raise_exception(message: str) -> None:
    """Raise the error that a template reports."""
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    """Return the current local time in this form."""
    return datetime.now().strftime(form)

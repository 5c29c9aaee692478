"""Chat templates: transformers' Jinja dialect in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from kvferry.protocol.errors import ConfigError, reason
from kvferry.router.text.sandbox import Sandbox

_PROBE = "kvferry-probe"


class _Generation(Extension):
    """Prints the body of `{% generation %}…{% endgeneration %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's compiled templates, rendered by `TextModel.render`; raises ConfigError on a syntax error.

    plain           template of `source`
    tool_use        template for requests with tools, for models that have both
    roles           roles that the templates compare a message's role with
    special_tokens  bos_token, eos_token, ...: variables of the templates
    wants_parts     a message's content must be a list of parts, not a string
    source          text of the tool template if there is one, else of the plain one
    knows_tools     the template shows tools
    takes_system    the template shows a system message
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, tool_use: str | None = None) -> None:
        environment = _environment()
        self.source = source
        try:
            self.plain = environment.from_string(source)
            self.tool_use = environment.from_string(tool_use) if tool_use is not None else self.plain
        except (TemplateError, SyntaxError, RecursionError, ValueError) as error:  # jinja compiles to Python
            raise ConfigError(f"the chat template does not parse: {reason(error)}", param="chat_template") from error
        trees = [environment.parse(source), environment.parse(tool_use or "")]
        self.source = tool_use or source
        self.knows_tools = any(name.name == "tools" for tree in trees for name in tree.find_all(nodes.Name))
        self.roles = _roles(trees[0]) | _roles(trees[1])
        self.special_tokens = dict(special_tokens)
        self.wants_parts = not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])
        system: Any = [{"type": "text", "text": _PROBE}] if self.wants_parts else _PROBE
        self.takes_system = self._shows(system, "system")

    def _shows(self, content: Any, role: str = "user") -> bool:
        messages = [{"role": role, "content": content}]
        if role != "user":
            messages.append({"role": "user", "content": [] if isinstance(content, list) else ""})
        try:
            text = self.plain.render(**self.special_tokens, messages=messages, add_generation_prompt=True)
        except Exception:  # as in TextModel.render: the template does not accept this form of content
            return False
        return _PROBE in text and "'type'" not in text


def _roles(tree: nodes.Template) -> frozenset[str]:
    """Return the texts that a template compares with a role."""
    found: set[str] = set()
    for comparison in tree.find_all(nodes.Compare):
        sides = [comparison.expr, *(operand.expr for operand in comparison.ops)]
        if any(map(_is_role, sides)):
            found |= {text for side in sides if not _is_role(side) for text in _texts(side)}
    return frozenset(found)


def _is_role(expression: nodes.Expr) -> bool:
    match expression:
        case nodes.Name(name="role") | nodes.Getattr(attr="role") | nodes.Getitem(arg=nodes.Const(value="role")):
            return True
    return False


def _texts(expression: nodes.Expr) -> list[str]:
    constants = [expression] if isinstance(expression, nodes.Const) else expression.find_all(nodes.Const)
    return [constant.value for constant in constants if isinstance(constant.value, str)]


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON without the HTML escapes of Jinja's own filter, on which no model was trained."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

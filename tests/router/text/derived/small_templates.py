"""Small chat templates, one for each way in which models write tool calls, and what renders and reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from kvferry.router.text.parsers.derived.derive import Derived
from kvferry.router.text.parsers.derived.reader import SyntaxParser
from kvferry.router.text.parsers.derived.syntax import ToolSyntax
from kvferry.router.text.parsers.output_parser import merged
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.template import ChatTemplate

HEAD = "{% if tools %}<|tools|>{{ tools | tojson }}<|end|>{% endif %}"
FRAME = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
ARGUMENTS = "{% for k, v in f.arguments | items %}"
AS_TEXT = "{{ v if v is string else v | tojson }}"
TREE = (
    "{% macro tree(v) %}{% if v is mapping %}{% for k, w in v | items %}@<{{ k }}>{{ tree(w) }}@</{{ k }}>{% endfor %}"
    "{% elif v is sequence and v is not string %}{% for w in v %}@<item>{{ tree(w) }}@</item>{% endfor %}"
    "{% else %}{{ v if v is string else v | tojson }}{% endif %}{% endmacro %}"
)
QUOTED = (
    "{% macro lit(v) %}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is mapping %}{{ '{' }}{% for k, w in v | items %}"
    "{{ k }}:{{ lit(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is boolean or v is none %}"
    "{{ v | tojson }}{% elif v is sequence %}[{% for w in v %}{{ lit(w) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)
CALLS: Mapping[str, str] = {
    "objects": EACH + "{{ '\\n' if not loop.first }}<tool_call>\n"
    '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}',
    "listed": "<|calls|>[" + EACH + "{{ ', ' if not loop.first }}"
    '{"id": "{{ loop.index0 }}", "tool": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% endfor %}]<|called|>",
    "keyed": "<|calls|>[" + EACH + '{{ ", " if not loop.first }}{"{{ f.name }}": {{ f.arguments | tojson }}}'
    "{% endfor %}]<|called|>",
    "numbered": "<|section|>" + EACH + "<|call|>functions.{{ f.name }}:{{ loop.index0 }}<|with|>"
    "{{ f.arguments | tojson }}<|call_end|>{% endfor %}<|section_end|>",
    "ids": EACH + "[CALLS]{{ f.name }}[ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "xml": EACH + "\n<tool_call>\n<function={{ f.name }}>\n" + ARGUMENTS + "<parameter={{ k }}>\n" + AS_TEXT
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "pairs": EACH + "\n<tool_call>{{ f.name }}\n" + ARGUMENTS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + AS_TEXT
    + "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "attributes": "\n<calls>\n" + EACH + '<invoke name="{{ f.name }}">\n' + ARGUMENTS
    + '<parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">' + AS_TEXT
    + "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</calls>",
    "wrapped": EACH + '<function name="{{ f.name }}">' + ARGUMENTS + '<param name="{{ k }}">'
    "{% if v is string and ('<' in v or '&' in v or '\\n' in v) %}<![CDATA[{{ v }}]]>{% else %}" + AS_TEXT
    + "{% endif %}</param>{% endfor %}</function>{% endfor %}",
    "python": "<|calls|>[" + EACH + "{{ ', ' if not loop.first }}{{ f.name }}(" + ARGUMENTS
    + "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){% endfor %}]<|called|>",
    "quoted": EACH + "<|call|>call:{{ f.name }}{{ '{' }}" + ARGUMENTS + "{{ k }}:{{ lit(v) }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}<|call_end|>{% endfor %}",
    "tree": "@<calls>\n" + EACH + '@<invoke name="{{ f.name }}">' + ARGUMENTS + "@<{{ k }}>{{ tree(v) }}@</{{ k }}>"
    "{% endfor %}@</invoke>\n{% endfor %}@</calls>",
    "single": "{% if m.tool_calls | length > 1 %}{{ raise_exception('one at once') }}{% endif %}" + EACH
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}',
}  # fmt: skip
UNTOLD = FRAME.replace("CALLS", CALLS["numbered"]) + "{{ '' if messages[-1].role == 'tool' }}"
"""Template that shows calls and results, but no tools, as DeepSeek V3.1's."""
SINGLE = "single"
"""The form with one call at most, which nothing but the call itself opens."""
SCHEMAS: Mapping[str, Any] = {
    "get": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"type": "integer"},
            "deep": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "where": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}},
        },
    },
    "put-it": {"type": "object", "properties": {"place": {"type": "string"}}},
}
Calls = Sequence[tuple[str, Mapping[str, Any]]]


@cache
def template(form: str) -> ChatTemplate:
    """Return the template of a form."""
    return ChatTemplate(TREE + QUOTED + HEAD + FRAME.replace("CALLS", CALLS[form]), {"eos_token": "<|end|>"})


def derived(form: str) -> Derived:
    """Return what the form's template reveals."""
    return template(form).derived


def syntax(form: str) -> ToolSyntax:
    """Return the syntax that the form's template reveals."""
    found = derived(form).calls
    assert found is not None
    return found


def written(form: str, calls: Calls, content: str = "") -> str:
    """Return an answer with these calls as the form's template writes it."""
    answer: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        answer["tool_calls"] = [
            {"id": f"c{place}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
            for place, (name, arguments) in enumerate(calls)
        ]
    text = template(form).render(Rendering("plain", {"messages": [{"role": "user", "content": "?"}, answer]}))
    return text.partition("<|assistant|>")[2].removesuffix("<|end|>")


def read(
    form: str, pieces: Sequence[str], *, patient: bool = False, is_whole: bool = False
) -> tuple[str, list[tuple[str, Any]]]:
    """Return text and calls that the form's parser finds."""
    parser = SyntaxParser(syntax(form), SCHEMAS, patient=patient)
    found = [*map(parser.feed, pieces), parser.finish(is_whole=is_whole)]
    calls = merged([delta for each in found for delta in each.calls])
    assert [call.index for call in calls] == list(range(len(calls)))
    return "".join(each.text for each in found), [(call.name, json.loads(call.arguments)) for call in calls]

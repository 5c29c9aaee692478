"""Templates rendered in the router's process: the same text as elsewhere, and never for long or with much memory."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.router.text.cheap_costs import Costly
from kvferry.router.text.cheap_templates import MAX_SOURCE, cheap_environment, is_cheap
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.sandbox import Sandbox
from kvferry.router.text.template import SMALL, ChatTemplate
from kvferry.router.text.template_language import environment
from tests.hostile_templates import BOMBS, TEMPLATES

MESSAGES = [
    {"role": "user", "content": " a,b ", "n": 3},
    {"role": "assistant", "content": "é<x>", "calls": [{"k": [1]}]},
]
HUGE = [{"role": "user", "content": "x," * (SMALL // 3)}]
WIDE = [{"role": "user", "content": "x", "many": [[] for _ in range(SMALL // 6)]}]


def cheap(source: str) -> bool:
    return is_cheap(environment(ImmutableSandboxedEnvironment).parse(source), source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.role == 'user' %}<{{ m['content'] | trim }}>{% else %}{{ m }}{% break %}{% endif %}{% endfor %}",
        "{% for m in messages[1:] if m.content %}{{ loop.index0 % 2 }}{{ loop.last }}{{ m | tojson }}{% endfor %}",
        "{% set n = namespace(x='', seen=false) %}{% for m in messages %}{% set n.x = n.x + m.content ~ loop.index %}{% endfor %}{{ n.x }}",
        "{% macro f(m, end='.') %}{{ m.content + end }}{% endmacro %}{{ f(messages[0]) }}{{ f(messages[1], end='!') | upper }}",
        "{{ messages | length }}{{ messages[0].content.split(',') | join('+') }}{{ messages[0].content.replace('a', 'bb') }}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}{{ messages[1].get('gone', 'none') }}",
        "{{ 'a' in messages[0].content }}{{ messages[0].role in ['user', 'tool'] }}{{ 'k' not in messages[1].calls[0] }}",
        "{{ missing is defined }}{{ messages is sequence }}{{ missing | default('d') }}{{ messages[1].calls | tojson(indent=2) }}",
        "{% set x %}{{ messages[0].content }}{% endset %}{{ x.strip() }}{{ -1 + 2 * 3 // 2 }}{{ 'b' if x else 'c' }}",
        "{% for i in range(3) %}{{ i }}{% endfor %}{{ messages[0].content.startswith(' a') }}{{ strftime_now('%Y') | length }}",
    ],
)  # fmt: skip
def test_a_cheap_template_writes_what_the_sandbox_writes(source: str) -> None:
    assert cheap(source)
    made: list[Any] = []
    for each in (cheap_environment(), environment(Sandbox)):
        try:
            made.append(each.from_string(source).render(messages=MESSAGES))
        except Costly:
            made.append(Costly)
    assert made[0] in (made[1], Costly)
    assert (made[0] is Costly) is ("{{ m }}" in source)

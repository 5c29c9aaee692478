"""Templates rendered in the router's process: the same text as elsewhere, and never for long or with much memory."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.model_files.template_language import environment
from kvferry.model_files.template_sandbox import Sandbox
from kvferry.router.text.cheap_costs import Costly
from kvferry.router.text.cheap_templates import MAX_SOURCE, cheap_environment, is_cheap
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.template import SMALL_BYTES, ChatTemplate
from tests.hostile_templates import BOMBS, TEMPLATES

MESSAGES = [
    {"role": "user", "content": " a,b ", "n": 3},
    {"role": "assistant", "content": "é<x>", "calls": [{"k": [1]}]},
]
HUGE = [{"role": "user", "content": "x," * (SMALL_BYTES // 3)}]
WIDE = [{"role": "user", "content": "x", "many": [[] for _ in range(SMALL_BYTES // 6)]}]


def cheap(source: str) -> bool:
    return is_cheap(environment(ImmutableSandboxedEnvironment).parse(source), source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if m.role == 'user' %}<{{ m['content'] | trim }}>{% else %}"
        "{{ m }}{% break %}{% endif %}{% endfor %}",
        "{% for m in messages[1:] if m.content %}{{ loop.index0 % 2 }}{{ loop.last }}{{ m | tojson }}{% endfor %}",
        "{% set n = namespace(x='', seen=false) %}"
        "{% for m in messages %}{% set n.x = n.x + m.content ~ loop.index %}{% endfor %}{{ n.x }}",
        "{% macro f(m, end='.') %}{{ m.content + end }}{% endmacro %}"
        "{{ f(messages[0]) }}{{ f(messages[1], end='!') | upper }}",
        "{{ messages | length }}{{ messages[0].content.split(',') | join('+') }}"
        "{{ messages[0].content.replace('a', 'bb') }}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}{{ messages[1].get('gone', 'none') }}",
        "{{ 'a' in messages[0].content }}{{ messages[0].role in ['user', 'tool'] }}"
        "{{ 'k' not in messages[1].calls[0] }}",
        "{{ missing is defined }}{{ messages is sequence }}{{ missing | default('d') }}"
        "{{ messages[1].calls | tojson(indent=2) }}",
        "{% set x %}{{ messages[0].content }}{% endset %}{{ x.strip() }}{{ -1 + 2 * 3 // 2 }}{{ 'b' if x else 'c' }}",
        "{% for i in range(3) %}{{ i }}{% endfor %}{{ messages[0].content.startswith(' a') }}"
        "{{ strftime_now('%Y') | length }}",
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


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | list }}",
        "{{ messages | map('upper') }}",
        "{{ '%s' | format(1) }}",
        "{{ [messages, messages] }}",
        "{{ {'a': messages} }}",
        "{{ (messages, 1) }}",
        "{{ 2 ** 9 }}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% macro f() %}{{ varargs }}{% endmacro %}",
        "{% call(x) f() %}{% endcall %}",
        "{% filter upper %}{% endfilter %}",
        "{% set x | upper %}{% endset %}",
        "{% include 'x' %}",
        "{{ f(*messages) }}",
        "{{ 1 is sameas(messages) }}",
        "x" * (MAX_SOURCE + 1),
    ],
    ids=lambda source: source[:30],
)
def test_what_can_cost_much_is_not_cheap(source: str) -> None:
    assert not cheap(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages + messages }}",
        "{{ messages }}",
        "{{ messages ~ 'x' }}",
        "{{ messages == messages }}",
        "{{ messages in [1, 2] or messages in messages }}",
        "{{ messages | join('x') }}",
        "{{ 'a' * 9 }}",
        "{{ '%9s' % 1 }}",
        "{{ 'a'.ljust(9) }}",
        "{{ '{}'.format(messages) }}",
        "{{ dict(a=messages) }}",
        "{{ namespace(messages[0]) }}",
        "{{ cycler('a', 'b').next() }}",
        "{{ messages | tojson(indent=99) }}",
        "{{ messages | tojson(separators=('xxxxxxxxxxxxxxxx', 'y')) }}",
        "{{ 'x'.strip(messages[0].content) }}",
        "{% set n = namespace(x=900000) %}{% for a in range(9) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)  # fmt: skip
def test_what_turns_out_to_cost_much_is_not_rendered_here(source: str) -> None:
    template = ChatTemplate("", {})
    template._compiled = {"plain": cheap_environment().from_string(source)}
    assert template.render_here(Rendering("plain", {"messages": HUGE})) is None


def test_large_variables_are_not_rendered_here() -> None:
    template = ChatTemplate("fine", {})
    assert template.render_here(Rendering("plain", {"messages": HUGE})) == "fine"
    assert template.render_here(Rendering("plain", {"messages": [*HUGE, *HUGE]})) is None


def test_a_template_that_is_costly_in_a_short_chat_is_never_tried_here() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content.ljust(20) }}{% endfor %}", {})
    assert not template.cheap
    assert template.takes_system


_LOOP = "{% for a in range(100000) %}OPERATION{% endfor %}"
_GROWTH = "{% set n = namespace(x=messages[0].content) %}" + _LOOP.replace("E%}", "E{% set n.x = n.x + n.x %}")
_OPERATIONS = (
    "{{ TEXT }}", "{% set y = messages | tojson %}", "{% set y = messages | tojson(indent=8) %}",
    "{% set y = TEXT[1:] %}", "{% set y = messages[::-1] %}", "{% if 'zz' in TEXT %}{% endif %}",
    "{% if TEXT == messages[-1].content %}{% endif %}", "{% set y = TEXT.split('x') %}", "{% set y = TEXT | upper %}",
    "{% set y = TEXT.replace('x', 'yyyyyyyyyyyyyyyyyyyy') %}", "{% set y = TEXT.strip('x,') %}",
    "{% if TEXT in messages[0].many %}{% endif %}", "{% set y = TEXT.split(',') | join(TEXT) %}",
    "{% set y %}{{ TEXT }}{% endset %}", "{% set y = TEXT ~ a ~ TEXT %}", "{% for c in TEXT %}{{ c }}{% endfor %}",
    "{% for k, v in messages[0] | items %}{{ v | length }}{% endfor %}",
    "{% set y = TEXT | tojson(ensure_ascii=true) %}",
    "{{ 'long constant text' }}" * 500, "long constant text" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("operation", _OPERATIONS, ids=lambda operation: operation[:40])
def test_no_operation_takes_long_or_much_memory(operation: str) -> None:
    """A hundred thousand of each, also with a text that doubles each time."""
    for text, form in (("messages[0].content", _LOOP), ("n.x", _GROWTH)):
        source = form.replace("OPERATION", operation.replace("TEXT", text))
        assert cheap(source)
        template = ChatTemplate("", {})
        template._compiled = {"plain": cheap_environment().from_string(source)}
        for messages in (HUGE, WIDE):
            began = time.thread_time()
            assert template.render_here(Rendering("plain", {"messages": messages})) is None
            assert time.thread_time() - began < 0.5
        tracemalloc.start()
        assert template.render_here(Rendering("plain", {"messages": HUGE})) is None
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 * 2**20


@pytest.mark.parametrize("source", [*TEMPLATES, *BOMBS.values()], ids=lambda source: source[:40])
def test_no_known_bomb_goes_off_here(source: str) -> None:
    began = time.thread_time()
    try:
        template = cheap_environment().from_string(source) if cheap(source) else None
        made = None if template is None else template.render(messages=MESSAGES)
    except Exception:
        made = None
    assert made is None or len(made) < 2**20
    assert time.thread_time() - began < 1

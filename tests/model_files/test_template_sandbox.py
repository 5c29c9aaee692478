"""What chat templates may compute."""

from __future__ import annotations

import time

import pytest
from jinja2 import TemplateError

from kvferry.model_files.template_language import environment
from kvferry.model_files.template_sandbox import MAX_TURNS, Sandbox
from tests.hostile_templates import TEMPLATES


def _render(source: str, messages: list[dict[str, str]]) -> str:
    return environment(Sandbox).from_string(source).render(messages=messages)


@pytest.mark.parametrize("source", TEMPLATES, ids=lambda source: source[:40])
def test_a_hostile_template_is_refused_within_seconds(source: str) -> None:
    began = time.thread_time()
    with pytest.raises((TemplateError, ValueError, SyntaxError, RecursionError, TypeError)):
        _render(source, [{"role": "user", "content": "hi"}])
    assert time.thread_time() - began < 10


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last }}{% endfor %}", "1/22/2."),
        ("{{ messages[0].content * 3 + '!' ~ 7 ~ messages | length }}", "hihihi!72"),
        ("{% for a in messages if a.role == 'user' recursive %}{{ a.content }}{% endfor %}", "hihi"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{{ messages | map(attribute='content') | join(', ') }}",
         "<a>hi, hi"),
        ("{{ 10000000000 | string }}{{ '%05.2f' % 3.14159 }}{{ '{:>4}'.format(1) }}{{ 'a' | indent(2) }}",
         "1000000000003.14   1a"),
        ("{% set n = namespace(c=0) %}{% for m in messages %}{% set n.c = n.c + 1 %}{% endfor %}{{ n.c }}", "2"),
        ("{{ 'a-b'.replace('-', '+') }}{{ 'a b'.split(' ') | last }}{{ messages | tojson | length }}", "a+bb70"),
    ],
)  # fmt: skip
def test_what_templates_do_is_as_ever(source: str, text: str) -> None:
    messages = [{"role": "user", "content": "hi"}] * 2
    assert _render(source, messages) == text


def test_each_rendering_has_turns_of_its_own() -> None:
    template = environment(Sandbox).from_string(
        "{% for a in range(90000) %}{% for b in 'abc' %}{% endfor %}{% endfor %}."
    )
    assert MAX_TURNS < 2 * 90000 * 4
    assert [template.render(messages=[]) for _ in range(2)] == [".", "."]

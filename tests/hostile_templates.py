"""Chat templates that would run for ever, take all memory, or read what is not theirs."""

from __future__ import annotations

from kvferry.router.text.render_frames import pack
from kvferry.router.text.template import ChatTemplate

TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(9) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x='a') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x='a') %}{% for a in range(9) %}{% set n.x = n.x.replace('a', 'a' * 99) %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for a in range(9) %}{% set n.x = n.x | replace('a', 'a' * 99) %}{% endfor %}",
    "{{ 'a' * 10 ** 11 }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ '%999999999999s' % 1 }}",
    "{{ '%999999999999s' | format(1) }}",
    "{{ '%*s' | format(999999999999, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 9999999999) }}",
    "{{ 'a'.ljust(99999999999) }}",
    "{{ 'a' | center(99999999999) }}",
    "{{ [[]] * 10 ** 10 }}",
    "{{ ([1] * 10 ** 6) | join('a' * 10 ** 6) }}",
    "{{ ('a' * 10 ** 6).join(['b'] * 10 ** 6) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{% extends x %}",
    "{{" * 5000,
    "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    "{{ lipsum(n=100000) }}",
    "{{ x.y.z }}",
)

_GROWN = "{% set n = namespace(x='a') %}{% for a in range(24) %}{% set n.x = n.x + n.x %}{% endfor %}"
_LONG = "{% set n = namespace(x=[1]) %}{% for a in range(20) %}{% set n.x = n.x + n.x %}{% endfor %}"
_NESTED = "{% set n = namespace(x=[1]) %}{% for a in range(27) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
BOMBS = {
    "printed in a loop": _GROWN + "{% for a in range(1000) %}{{ n.x }}{% endfor %}",
    "kept lists": _GROWN
    + "{% set k = namespace(a=[]) %}{% for a in range(200) %}{% set k.a = k.a + [n.x | list] %}{% endfor %}",
    "nested lists as JSON": _NESTED + "{{ n.x | tojson | length }}",
    "nested lists printed": _NESTED + "{{ n.x }}",
    "nested lists compared": _NESTED + "{% set m = n.x %}" + _NESTED + "{{ m == n.x }}",
    "JSON indent": "{{ [[[[[[1] * 99] * 99]]]] | tojson(indent=1000000) | length }}",
    "join": _GROWN + "{{ ([n.x] * 1000) | join | length }}",
    "map": _LONG + "{{ n.x | map('string') | map('center', 9999) | list | length }}",
    "batch": _LONG + "{{ n.x | batch(1) | list | length }}{{ n.x | batch(1, 1) | map('list') | list | length }}",
    "slice": "{{ 'a' | slice(1048576) | map('list') | map('string') | list | length }}",
    "groupby": _LONG + "{{ n.x | groupby('real') | length }}",
    "sort": _GROWN + "{{ n.x | sort | length }}",
    "wordwrap": _GROWN + "{{ n.x | wordwrap(1) | length }}",
    "urlize": "{{ ('http://a.bc ' * 1000000) | urlize | length }}",
    "format": _GROWN + "{{ ('{0}' * 200).format(n.x) | length }}",
    "format filter": _GROWN + "{{ ('%(a)s' * 200) | format(a=n.x) | length }}",
    "multiplied numbers": "{% set n = namespace(x=3) %}{% for a in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}"
    "{{ n.x > 1 }}",
    "pprint": _LONG + "{% for a in range(99) %}{{ n.x | pprint | length }}{% endfor %}",
    "translate": _GROWN + "{{ n.x.translate({97: 'a' * 999}) | length }}",
    "set block": _GROWN + "{% set k %}{% for a in range(1000) %}{{ n.x }}{% endfor %}{% endset %}{{ k | length }}",
}
"""Templates whose memory or time the sandbox alone does not bound."""


def template_in_child(source: str) -> ChatTemplate:
    """A template that is rendered in child processes, and nothing of it at load."""
    template = ChatTemplate("", {})
    template.cheap, template.sources = False, pack({"plain": source, "tool_use": source})
    return template

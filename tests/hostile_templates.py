"""Chat templates that would run for ever, take all memory, or read what is not theirs."""

from __future__ import annotations

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

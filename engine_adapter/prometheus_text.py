"""Reader of single values from an engine's metrics, in Prometheus' text format.

An engine exposes hundreds of histogram lines; only the named ones are read."""

from __future__ import annotations

import re

_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def value(text: str, *names: str) -> float:
    """Return the sum over all label sets of the first of these metrics that exists; 0 if none does."""
    for name in names:
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})?[ ]([^\s]+)", text, re.MULTILINE)
        numbers = [number for each in found if (number := _number(each)) == number]
        if numbers:
            return sum(numbers)
    return 0.0


def labels(text: str, name: str) -> dict[str, str]:
    """Return the labels of a metric's first sample; empty if there is none."""
    found = re.search(rf"^{re.escape(name)}\{{([^\n]*)\}}[ ]", text, re.MULTILINE)
    return dict(_LABEL.findall(found[1])) if found else {}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")

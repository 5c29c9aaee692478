"""Crowds of long prompts ask for more than the cluster has, so what waits beside one says nothing of other faults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.chaos.deeds import Done
from tests.chaos.load import Asked

FELT_S = 3.0
"""For so many seconds after a crowd has left its prompts may still be felt."""


def apart_from_crowds(asked: Iterable[Asked], done: Sequence[Done]) -> list[Asked]:
    """Those whose longest pause no crowd touched."""
    crowds = [(each.at, (each.until or each.at) + FELT_S) for each in done if each.fault.kind == "crowd"]
    return [each for each in asked if each.pause and not _touched(*each.pause, crowds)]


def _touched(began: float, seconds: float, crowds: Sequence[tuple[float, float]]) -> bool:
    return any(since < began + seconds and began < until for since, until in crowds)

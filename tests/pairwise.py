"""Parameters of tests in pairs: each value of one beside each value of another, where all combinations take long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def pairwise(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Every pair of values that three parameters can have, in one combination for each pair of the first two.

    Raises ValueError where the third has more values than one of the others: some pairs would be missing."""
    if len(third) > min(len(first), len(second)):
        raise ValueError("the third parameter must have the fewest values")
    return [(a, b, third[(i + j) % len(third)]) for i, a in enumerate(first) for j, b in enumerate(second)]

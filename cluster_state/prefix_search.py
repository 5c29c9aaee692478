"""Search for the longest cached prefix of a chain of blocks, with few lookups."""

from __future__ import annotations

from collections.abc import Callable


def longest(count: int, held: Callable[[int], bool]) -> int:
    """Return the number of leading blocks held, of `count`; held(i) returns whether block i = 0 … count - 1 is held.

    Gallops by fours, then bisects: at most 3 * log4(count) + 3 calls. If rows in between are missing, the result is
    some i with held(i - 1) and not held(i)."""
    if count == 0 or not held(0):
        return 0
    low, high = 1, 4
    while high <= count and held(high - 1):
        low, high = high, 4 * high
    high = min(high, count + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if held(middle - 1):
            low = middle
        else:
            high = middle
    return low

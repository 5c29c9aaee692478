"""Changes of bytes and of JSON values, as a seed says."""

from __future__ import annotations

import random
import struct
from copy import deepcopy
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 3, 2**31, 2**32 + 1, 2**63, 10**30, 1e308, -0.5, float("nan"), float("inf"), "", "x", "é" * 9,
    [], [0], [[]], ["a", 1], {}, {"a": 1}, {"type": "BPE"}, "</s>", 64, 4096,
)  # fmt: skip
NUMBERS = (0, 1, 2, 31, 63, 64, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def bytes_mutated(chance: random.Random, data: bytes, head: int) -> tuple[bytes, str]:
    """A few changes, most of them within the first `head` bytes."""
    changed, done = bytearray(data), []
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        place = chance.randrange(max(1, min(head, len(changed)) if chance.random() < 0.9 else len(changed)))
        match chance.randrange(6):
            case 0:
                changed[place : place + 1] = bytes([chance.randrange(256)])
                done.append(f"a byte at {place}")
            case 1 | 2:
                width, number = chance.choice((4, 8)), chance.choice(NUMBERS)
                changed[place : place + width] = struct.pack("<Q", number)[:width]
                done.append(f"{number} in {width} bytes at {place}")
            case 3:
                del changed[place:]
                done.append(f"cut at {place}")
            case 4:
                del changed[place : place + chance.randrange(1, 64)]
                done.append(f"a gap at {place}")
            case _:
                changed[place:place] = chance.randbytes(chance.randrange(1, 64))
                done.append(f"noise at {place}")
    return bytes(changed), ", ".join(done)


def json_mutated(chance: random.Random, value: Any) -> str:
    """One value somewhere within is another, is gone, or lies very deep."""
    place, path = value, []
    while True:
        keys: list[Any] = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return "nothing"
        key = chance.choice(keys)
        path.append(str(key))
        if isinstance(place[key], dict | list) and place[key] and chance.random() < 0.8:
            place = place[key]
            continue
        odd: Any = deepcopy(chance.choice(ODD))
        if chance.random() < 0.05:
            odd = 0
            for _ in range(400):
                odd = [odd]
        if chance.random() < 0.15:
            del place[key]
            return f"no {'.'.join(path)}"
        place[key] = odd
        return f"{'.'.join(path)} = {str(odd)[:40]}"

"""What a mistake is that is put into the code on trial."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Mutant = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True, slots=True)
class Mistake:
    """make: has the code make it, while the block runs; blamed: what the simulation then says, as a pattern."""

    make: Callable[[], Mutant]
    blamed: str


def mutant(blamed: str) -> Callable[[Callable[[], Mutant]], Mistake]:
    return lambda make: Mistake(make, blamed)

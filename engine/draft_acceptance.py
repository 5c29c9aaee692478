"""`accept` verifies speculative tokens: keeps the longest correct prefix of a draft, and the token drawn after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.engine.sampler import Sampled


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tokens drawn for one slice: its correct drafts and the next token. `drafted`: number of its drafts."""

    tokens: tuple[Sampled, ...]
    drafted: int


def accept(drafts: Sequence[int], drawn: Sequence[Sampled | None]) -> Accepted:
    """Return the drawn tokens that follow correct drafts alone."""
    right = 0
    while right < len(drafts) and _is(drawn[right], drafts[right]):
        right += 1
    return Accepted(tuple(one for one in drawn[: right + 1] if one is not None), len(drafts))


def _is(drawn: Sampled | None, token_id: int) -> bool:
    return drawn is not None and drawn.token_id == token_id

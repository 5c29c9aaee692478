"""OrderedTokens: puts the token deltas of several attempts in order, each token once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from kvferry.protocol.messages import TokenDelta


@dataclass(slots=True)
class OrderedTokens:
    """Output tokens delivered so far (`tokens`), and whether the last one was among them (`finished`).

    Deltas of one attempt may arrive early, twice or overlapping. `restart` drops early deltas when another attempt
    takes over."""

    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    _early: dict[int, TokenDelta] = field(default_factory=dict)

    def restart(self) -> None:
        """Drop early deltas of the previous attempt."""
        self._early.clear()

    def take_next(self, delta: TokenDelta) -> bool:
        """Take a delta if it directly continues the delivered tokens and is not the last; return whether it did."""
        if not 0 < len(self.tokens) == delta.index or delta.finish_reason is not None or self._early:
            return False
        self.tokens += delta.token_ids
        return True

    def push(self, delta: TokenDelta) -> Iterable[TokenDelta]:
        """Take a delta and return the deltas that are now due, trimmed to begin after the last delivered token.

        Consume the result at once: each delta counts as delivered when it is iterated."""
        if delta.index == len(self.tokens) and not self._early and not self.finished:
            return (self._take(delta),)
        return self._due(delta)

    def _due(self, delta: TokenDelta) -> Iterator[TokenDelta]:
        known = self._early.get(delta.index)
        if known is None or _completeness(known) < _completeness(delta):
            self._early[delta.index] = delta
        while self._early and not self.finished:
            index = min(self._early)
            if index > len(self.tokens):
                return
            due = _tail(self._early.pop(index), len(self.tokens) - index)
            if due is not None:
                yield self._take(due)

    def _take(self, due: TokenDelta) -> TokenDelta:
        self.tokens += due.token_ids
        self.finished = due.finish_reason is not None
        return due


def _completeness(delta: TokenDelta) -> tuple[int, bool]:
    return (len(delta.token_ids), delta.finish_reason is not None)


def _tail(delta: TokenDelta, skip: int) -> TokenDelta | None:
    """Return the delta without its first `skip` tokens; None if nothing new is left."""
    if skip == 0:
        return delta
    if skip > len(delta.token_ids) or (skip == len(delta.token_ids) and delta.finish_reason is None):
        return None
    return replace(
        delta,
        index=delta.index + skip,
        token_ids=delta.token_ids[skip:],
        logprobs=None if delta.logprobs is None else delta.logprobs[skip:],
    )

"""Rollback by replay, for matchers whose grammar counts tokens (`max_tokens=`, `stop=`), which llguidance lacks."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from kvferry.protocol.errors import GrammarFailed

KEPT = 256
"""Number of tokens that can be undone: more than an engine drafts in one step."""


class ReplayedRollback:
    """An older copy of a matcher, and the tokens that it accepted since."""

    def __init__(self, matcher: LLMatcher, since: Sequence[int] = ()) -> None:
        self._older, self._since = matcher.deep_copy(), list(since)

    def copy(self) -> ReplayedRollback:
        """Return an independent copy."""
        return ReplayedRollback(self._older, self._since)

    def accepted(self, token_ids: Sequence[int]) -> None:
        """Remember tokens that the matcher accepted."""
        self._since += token_ids
        if len(self._since) > 2 * KEPT:
            passed = len(self._since) - KEPT
            self._older.try_consume_tokens(self._since[:passed])
            del self._since[:passed]

    def before(self, count: int) -> LLMatcher:
        """Return a matcher without the last `count` tokens; raise GrammarFailed if it no longer knows them."""
        if count > len(self._since):
            raise GrammarFailed(f"the grammar counts tokens, and {count} cannot be undone")
        del self._since[len(self._since) - count :]
        matcher = self._older.deep_copy()
        matcher.try_consume_tokens(self._since)
        return matcher


def needs_replay(lark: str) -> bool:
    """Return whether the library may be unable to roll back a matcher of this grammar."""
    return "max_tokens" in lark or "stop" in lark

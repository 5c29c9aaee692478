"""ReuseAccount: compares predicted and actual prefix reuse of a request, with the reasons for misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvferry.placement.types import Placement
from kvferry.protocol.errors import Fenced, Incompatible, KvferryError, NodeLost, StreamLost, TransferFailed
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import TokenDelta
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.router.dispatch.attempt import Attempt
from kvferry.router.dispatch.context import DispatchContext
from kvferry.router.dispatch.interface import Route

REASONS: tuple[tuple[type[KvferryError], str], ...] = (
    (Fenced, "fenced"),
    (NodeLost, "node_lost"),
    (StreamLost, "node_lost"),
    (Incompatible, "layout"),
    (TransferFailed, "not_arrived"),
    (KvferryError, "refused"),
)
"""Reason for an attempt's missed prefix reuse, by the first matching type of the error that ended it."""


class ReuseAccount:
    """Predicted and actual reuse of a request.

    An attempt's report comes with its first token, or with its last one from engines that report only then."""

    def __init__(self, context: DispatchContext) -> None:
        self._context, self._prediction, self._waited_s = context, Prediction(), 0.0
        self.began, self.ended = self._prediction.began, self._prediction.ended

    def first(self, delta: TokenDelta, attempt: Attempt, node: NodeLease) -> tuple[Reuse, bool]:
        """Return the reuse at the request's first token, and whether the node reports it only later."""
        late = delta.reuse is None and bool(node.engine)
        reuse, self._waited_s = self._context.account(delta.reuse, attempt.job, node), attempt.age_s
        if not late:
            self._record(attempt, reuse)
        return reuse, late

    def later(self, delta: TokenDelta, attempt: Attempt, route: Route) -> Reuse | None:
        """Take a report that comes after the request's first token; return it if it replaces the route's."""
        reported, recovers = delta.reuse, len(attempt.job.token_ids) > attempt.job.prompt_len
        if recovers and reported is not None:
            self._context.metrics.recovered["cached"].inc(reported.cached_len)
            self._context.metrics.recovered["computed"].inc(reported.computed)
        if recovers or not route.late:
            return None
        reuse = self._context.account(reported, attempt.job, attempt.placement.decode)
        self._record(attempt, reuse)
        return reuse

    def _record(self, attempt: Attempt, reuse: Reuse) -> None:
        missed = self._prediction.missed(attempt.job.attempt, reuse)
        self._context.record(attempt.placement, self._prediction.tokens, missed, reuse, self._waited_s)


class Prediction:
    """Predicted reuse of the attempts before the first token, by attempt number.

    `tokens` is the prediction of the first attempt, which counts as the request's prediction."""

    def __init__(self) -> None:
        self.tokens = 0
        self._attempts: dict[int, tuple[int, str]] = {}

    def began(self, number: int, placement: Placement) -> None:
        """Record an attempt; unless `ended` records an error, a hedge has outrun it."""
        if not self._attempts:
            self.tokens = placement.cached_len
        self._attempts[number] = (placement.cached_len, "outrun")

    def ended(self, number: int, error: KvferryError) -> None:
        """Record the error that ended an attempt."""
        if number in self._attempts:
            reason = next(reason for kind, reason in REASONS if isinstance(error, kind))
            self._attempts[number] = (self._attempts[number][0], reason)

    def missed(self, number: int, reuse: Reuse) -> Mapping[str, int]:
        """Return the tokens that were predicted and not reused, by reason, after attempt `number` delivered.

        For tokens predicted on the delivering node, the reason is the node's own. For all other tokens, it is the error
        of the last attempt that was predicted to reuse them."""
        if not self.tokens:
            return {}
        missed: Counter[str] = Counter()
        there, _ = self._attempts.get(number, (self.tokens, ""))
        at, until = reuse.cached_len, min(self.tokens, there)
        for reason, tokens in (*reuse.missed, ("unknown", until)):
            taken = min(tokens, until - at)
            if taken > 0:
                missed[reason] += taken
                at += taken
        for cached, reason in reversed([reported for each, reported in self._attempts.items() if each != number]):
            if min(cached, self.tokens) > at:
                missed[reason] += min(cached, self.tokens) - at
                at = min(cached, self.tokens)
        return missed

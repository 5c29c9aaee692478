"""RequestTargets: places one request that has latency targets, or a patient one that such requests may preempt."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence, Sized
from dataclasses import replace

from kvferry.placement.rejections import TargetMissed
from kvferry.placement.types import Demand, NodeKey, Placement
from kvferry.protocol.errors import Overloaded
from kvferry.router.dispatch.context import DispatchContext, Hits
from kvferry.router.nodes.model_nodes import FingerprintGroup
from kvferry.router.request_context import RequestContext


class RequestTargets:
    """Targets of one request, or a patient request that others may preempt. Implements `displacement.PatientRequest`.

    delivered  the growing list of its output tokens
    leave      ends all its attempts and calls `runs_on`
    wake       lets its dispatch start an attempt if none runs"""

    def __init__(
        self,
        call: RequestContext,
        context: DispatchContext,
        delivered: Sized,
        leave: Callable[[], None],
        wake: Callable[[None], None],
    ) -> None:
        self._call, self._context, self._delivered, self._leave, self._wake = call, context, delivered, leave, wake
        self._displacement = context.displacement
        self._uncached = self._known = 0

    @property
    def uncomputed(self) -> int:
        return self._uncached if len(self._delivered) == self._known else 0

    def preempt(self) -> None:
        self._displacement.wait(self)
        self._leave()
        self.retry()

    def retry(self) -> None:
        self._wake(None)

    @property
    def waits(self) -> bool:
        """Return whether the request is patient and waits because of requests with targets."""
        return self._displacement.waits(self)

    def place(
        self, demand: Demand, reuse: Hits, groups: Sequence[FingerprintGroup], target_s: float
    ) -> Placement | None:
        """Place an attempt; preempt patient requests if it would otherwise miss its targets.

        Returns None if the request is patient and has to wait. target_s: time that is left until its first token.
        Raises what `DispatchContext.place` raises."""
        demand = self._bound(demand)
        if demand.background and not self._displacement.may_try(self):
            self._displacement.wait(self)
            return None
        try:
            placement = self._placed(demand, reuse, groups, target_s)
        except Overloaded:
            if not demand.background:
                raise
            self._displacement.wait(self)
            return None
        self._displacement.stop_waiting(self)
        self._uncached, self._known = max(0, demand.total_len - placement.cached_len), len(self._delivered)
        return placement

    def runs_on(self, nodes: Collection[NodeKey]) -> None:
        """Record the nodes on which the request's attempts run now."""
        if self._call.is_background:
            self._displacement.runs(self, nodes)
        elif self._call.has_targets:
            self._displacement.has_target(self, self._call.itl_s)

    def end(self) -> None:
        """Forget the request at the end of its dispatch."""
        self._displacement.end(self)
        self._leave = _nothing  # drops the dispatch, so that no reference cycle is left to the garbage collector

    def _bound(self, demand: Demand) -> Demand:
        """Return the demand; of a patient request, with the shortest target of requests that have targets now."""
        shortest_s = self._displacement.itl_s() if self._call.is_background else None
        return demand if shortest_s is None else replace(demand, recovers=False, background=True, itl_s=shortest_s)

    def _placed(self, demand: Demand, reuse: Hits, groups: Sequence[FingerprintGroup], target_s: float) -> Placement:
        context, displacement = self._context, self._displacement
        try:
            placement = context.place(demand, reuse, groups)
        except TargetMissed:
            if demand.background or not displacement.displace_streams(demand, groups):
                raise
            placement = context.place(demand, reuse, groups)
        late_s = placement.promised_s - target_s
        if late_s > 0 and displacement.displace_prompts(placement, late_s):
            return context.place(demand, reuse, groups)
        return placement


def _nothing() -> None:
    """Do nothing: the dispatch has ended."""

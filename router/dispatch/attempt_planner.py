"""AttemptPlanner: chooses the nodes of each attempt of a request, given how earlier attempts failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import inf

from kvferry.placement.rejections import TargetMissed, no_compatible_nodes, too_late
from kvferry.placement.types import Demand, NodeKey, Placement
from kvferry.protocol.errors import DeadlineExceeded, GrantRefused, KvferryError, NodeDown, NoNodes, Overloaded
from kvferry.protocol.lease import NodeLease
from kvferry.router.dispatch import jobs
from kvferry.router.dispatch.context import DispatchContext, Hashes, Hits
from kvferry.router.dispatch.failures import Failure
from kvferry.router.dispatch.interface import RequestSpec
from kvferry.router.dispatch.poison_requests import Suspect
from kvferry.router.dispatch.prompt_media import with_encoding
from kvferry.router.dispatch.request_targets import RequestTargets
from kvferry.router.dispatch.retry_policy import RetryPolicy
from kvferry.router.dispatch.timers import Backoff
from kvferry.router.nodes.model_nodes import FingerprintGroup
from kvferry.router.nodes.node_entry import node_key

log = logging.getLogger(__name__)


class AttemptPlanner:
    """Chooses the nodes of each attempt of a request; the owner must call `end`.

    `delivered` is the growing list of output tokens sent to the client. `failures` counts failed attempts.
    `fingerprint` is that of the nodes that may take the request; empty: any, until its first token. A prompt
    with media has it from the start. `holders`: nodes with the prompt's blocks, after its first token. leave, wake: see
    RequestTargets."""

    def __init__(
        self,
        spec: RequestSpec,
        context: DispatchContext,
        delivered: list[int],
        leave: Callable[[], None],
        wake: Callable[[None], None],
    ) -> None:
        self.backoff, self.failures = Backoff(context.max_wait_s), 0
        self._spec, self._context, self._delivered = spec, context, delivered
        has_part = spec.call.is_background or spec.call.has_targets
        self._targets = RequestTargets(spec.call, context, delivered, leave, wake) if has_part else None
        self._retry_policy, self._suspect = RetryPolicy(), Suspect()
        bound = [each.fingerprint for each in (spec.delivered, spec.fork_of, spec.media) if each]
        self.fingerprint = next(filter(None, bound), "")
        self._failure: KvferryError | None = None
        self._needs_budget = False
        self._held: dict[NodeKey, int] = {}
        self.holders: list[NodeLease] = []
        self._hashes: Hashes = {}

    @property
    def begun(self) -> bool:
        """Return whether a token has been delivered."""
        return bool(self._delivered)

    @property
    def _is_new(self) -> bool:
        return self._failure is None and not self._delivered

    def hashes(self, node: NodeLease | None) -> Sequence[bytes]:
        """Return the hashes of the full blocks of all tokens on such a node, as computed by `reuse`."""
        return self._hashes.get(node.fingerprint, ()) if node else ()

    async def reuse(self) -> Hits:
        """Return the leading blocks of all tokens so far that nodes hold."""
        token_ids = self._spec.token_ids + tuple(self._delivered)
        self._hashes = {each.fingerprint: jobs.hashes(self._spec, token_ids, each) for each in self._groups()}
        return await self._context.reuse(self._hashes, self._held)

    def place(self, reuse: Hits, left_s: float) -> Placement | None:
        """Place the next attempt; return None if nothing can take it now and it must wait.

        A request that never ran is rejected at once if its first token would come too late, if no node can meet its
        target, or if all are full and many requests already wait; one that continues after delivered tokens is not.
        Raises NoNodes, Overloaded and ContextLengthExceeded."""
        demand, target_s = self._demand(), self._target_s()
        left_s = min(left_s, target_s)
        try:
            self._spend_retry()
            placement = self._placed(demand, reuse, target_s)
        except (NoNodes, Overloaded) as error:
            if self._is_new and (
                isinstance(error, TargetMissed)
                or (isinstance(error, Overloaded) and not self._context.held.takes(self))
            ):
                raise
            if self.backoff.expired(left_s):
                raise self._final_error(error) from self._failure
            if not self._needs_budget:
                self._retry_policy.clear_avoided()
            self._context.held.enter(self, demand.total_len)
            return None
        if placement is None:
            return None
        self._context.held.leave(self)
        if self._is_new and placement.promised_s > left_s and (left_s > 0 or target_s < inf):
            raise too_late(placement.promised_s - left_s)
        return placement

    def _placed(self, demand: Demand, reuse: Hits, target_s: float) -> Placement | None:
        if self._targets is not None:
            return self._timed(self._targets.place(demand, reuse, self._groups(), target_s))
        return self._timed(self._context.place(demand, reuse, self._groups()))

    def _timed(self, placement: Placement | None) -> Placement | None:
        """Return the placement with the time of encoding the request's media."""
        media = self._spec.media
        return with_encoding(placement, media, self._context.model) if placement and media else placement

    def place_second(
        self, choices: Sequence[Collection[NodeKey]], reuse: Hits, *, strict: bool = False
    ) -> Placement | None:
        """Place a second attempt that avoids the first of these sets of nodes possible; None if no node has room.

        Each set is tried with all nodes that may hang first. strict: not without them."""
        demand = replace(self._demand(), pinned=None, recovers=False)
        suspects = self._context.model.suspects
        doubtless = [suspects.union(avoided) for avoided in choices]
        for avoided in doubtless if strict else (*doubtless, *choices):
            with contextlib.suppress(NoNodes, Overloaded):
                apart = replace(demand, excluded=demand.excluded | {*avoided})
                return self._timed(self._context.place(apart, reuse, self._groups(again=True)))
        return None

    def place_migration(self, leaving: Placement, avoided: Collection[NodeKey], reuse: Hits) -> Placement | None:
        """Place a stream on another decode node than the draining one; None if no node can take it now.

        Nodes of another fingerprint, as in a rollout that changes it, cannot read its blocks."""
        assert leaving.decode
        demand, source = self._demand(), node_key(leaving.decode)
        moves = replace(
            demand, excluded=demand.excluded | {*avoided, source}, pinned=None, local_only=True, source=source
        )
        with contextlib.suppress(NoNodes, Overloaded):
            return self._context.place(moves, reuse, self._context.model.of(leaving.decode.fingerprint))
        return None

    def runs_on(self, nodes: Collection[NodeKey]) -> None:
        """Record the nodes on which the request's attempts run now."""
        if self._targets is not None:
            self._targets.runs_on(nodes)
        if self._suspect.losses:
            self._context.deaths.move(self._suspect, nodes)

    def failed(self, failure: Failure, others: Collection[NodeKey]) -> str:
        """Apply the retry policy after a failure and return the name of its step.

        `others` are the nodes of an attempt that still runs. Raises the error if no other attempt can help."""
        died = isinstance(failure.error, NodeDown)
        faulty = node_key(failure.at_fault[0])
        if died:
            self._context.deaths.died(faulty, failure.works, self._suspect, len(self._delivered))
        self.runs_on(others)
        self.failures += 1
        self._failure, self._needs_budget = failure.error, not died and not self._delivered
        prefills = self._context.usable("prefill", faulty, self._spec.adapter, self.fingerprint)
        return self._retry_policy.next_step(failure, len(self._delivered), prefills)

    def record_progress(self) -> None:
        """Record progress: tokens arrived; called for every output."""
        if self._failure is None and not self.backoff.waiting:
            return
        self.backoff.reset()
        if self._suspect.losses and self._suspect.cleared_by(len(self._delivered)):
            self._context.deaths.clear(self._suspect)

    def computed(self, node: NodeLease, other: NodeLease | None) -> None:
        """Record that `node` computed the prompt and holds it for a while, as does `other`, to which it was shipped.

        Other kernels would give other tokens, so its first token binds the request to its fingerprint."""
        self.fingerprint = node.fingerprint
        self._held[node_key(node)] = len(self._spec.token_ids) // node.block_size
        self.holders[:] = [each for each in (node, other) if each]
        self._context.remember(self.hashes(node), self.holders)

    def expired(self) -> KvferryError:
        """Return the error of the request after its deadline."""
        call = self._spec.call
        if self._targets is not None and self._targets.waits:
            return Overloaded(
                "requests with latency targets took precedence until the deadline of this one", retry_after=1.0
            )
        return DeadlineExceeded(f"not finished after {call.deadline - call.arrival:.3g} s")

    def end(self) -> None:
        """Stop waiting and clear suspicions at the end of the dispatch."""
        self._context.held.leave(self)
        if self._targets is not None:
            self._targets.end()
        if self._suspect.losses:
            self._context.deaths.clear(self._suspect)

    def _groups(self, *, again: bool = False) -> Sequence[FingerprintGroup]:
        """Return the groups that may take the next attempt; again: it is not the first one."""
        model, canary = self._context.model, self._context.canary
        if self.fingerprint:
            return model.of(self.fingerprint)
        if canary is None or len(model.groups) == 1:
            return model.groups
        return canary.groups(model, self._spec, again=again or self._failure is not None)

    def _demand(self) -> Demand:
        fork, deaths, retry_policy = self._spec.fork_of, self._context.deaths, self._retry_policy
        excluded, broken = retry_policy.excluded, retry_policy.broken
        if deaths.any:
            excluded |= deaths.forbidden_nodes(self._suspect)
        return Demand(
            total_len=len(self._spec.token_ids) + len(self._delivered),
            prompt_only=self._spec.work.ends_on_prompt(len(self._delivered)),
            excluded=excluded,
            broken=broken,
            penalties=deaths.sharing_costs(self._suspect) if deaths.any else {},
            recovers=bool(self._delivered),
            pinned=retry_policy.pinned,
            local_only=retry_policy.local_only,
            beside=fork.node if fork and not self._delivered else None,
            adapter=self._spec.adapter,
            modalities=self._spec.media.modalities if self._spec.media else frozenset(),
            itl_s=self._spec.call.itl_s,
        )

    def _target_s(self) -> float:
        """Return the seconds that a new request has until its first token; infinite without a target."""
        first_by = self._spec.call.first_by
        return first_by - asyncio.get_running_loop().time() if first_by < inf and self._is_new else inf

    def _spend_retry(self) -> None:
        """Spend retry budget if no token is out and no node died; raise Overloaded if the budget is empty."""
        if self._needs_budget and not self._context.retries.spend():
            raise Overloaded("the retry budget is exhausted", retry_after=1.0)
        self._needs_budget = False

    def _final_error(self, error: KvferryError) -> KvferryError:
        if isinstance(self._failure, GrantRefused | Overloaded):
            return Overloaded("every decode node is full", retry_after=error.retry_after or 1.0)
        if isinstance(error, NoNodes) and self.fingerprint and any(map(self._is_other, self._context.model.groups)):
            return no_compatible_nodes(self._context.model.name.first)
        return error

    def _is_other(self, group: FingerprintGroup) -> bool:
        return group.decodes and group.fingerprint != self.fingerprint

"""KvferryPolicy: kvferry's own routing in a simulation: the real node table, index and placement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from kvferry.model_files.model_name import ModelName
from kvferry.placement.rejections import TargetMissed, too_late
from kvferry.placement.types import Demand
from kvferry.protocol.errors import NodeLost, NoNodes, Overloaded
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.router.dispatch.background_calls import BackgroundCalls
from kvferry.router.dispatch.inflight_prefixes import ExpectedPrefix
from kvferry.router.dispatch.model_cluster import ModelCluster
from kvferry.router.dispatch.poison_requests import PoisonRequests
from kvferry.router.dispatch.prefixes import Prefixes
from kvferry.router.dispatch.request_targets import RequestTargets
from kvferry.router.dispatch.retry_budget import RetryBudget
from kvferry.router.dispatch.router_services import RouterServices
from kvferry.router.dispatch.timers import Spacing
from kvferry.router.nodes.client import NodeClient
from kvferry.router.nodes.model_nodes import ModelNodes
from kvferry.router.nodes.node_entry import NodeEntry, Reservation
from kvferry.router.nodes.node_table import NodeTable
from kvferry.router.nodes.session_notes import SessionNoter
from kvferry.router.request_context import RequestContext
from kvferry.router.request_log import RequestLog
from kvferry.simulate.fleet import Fleet
from kvferry.simulate.node import Node, Run
from kvferry.simulate.policy import Choice
from kvferry.simulate.results import Goal
from kvferry.simulate.trace_request import TraceRequest

LOOKUP_S = 60.0
"""Timeout of an index lookup, in seconds; on the virtual clock every lookup is instant."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A run's delivered tokens, of which RequestTargets needs only the number."""

    run: Run

    def __len__(self) -> int:
        """Return the tokens delivered so far."""
        return self.run.delivered


class KvferryPolicy:
    """kvferry's policy, with reservations made and released as in a real dispatch (router/dispatch/attempt.py).

    Implements `simulate.policy.Policy`. local_tokens: see RouterSettings.local_prefill_tokens. targets: of all
    requests but background ones, as of tenants with `ttft_ms` and `itl_ms`; None: no request is rejected."""

    def __init__(self, local_tokens: int = 0, targets: Goal | None = None) -> None:
        self._local_tokens, self._targets = local_tokens, targets
        self._bookings: dict[Run, list[Reservation]] = {}
        self._expected: dict[Run, ExpectedPrefix] = {}
        self._requests: dict[Run, RequestTargets] = {}
        self._displaced: list[Run] = []

    def enter(self, fleet: Fleet) -> None:
        metrics, clock = RouterMetrics(), fleet.clock.time
        self._fleet, self.table = fleet, NodeTable(fleet.store, metrics, clock=clock)
        client, budget = NodeClient("simulator"), RetryBudget(0.0, 0.0, 0.0, clock)
        prefixes = Prefixes(fleet.store, metrics, LOOKUP_S, clock)
        deaths, request_log = PoisonRequests(clock), RequestLog()
        background_calls = BackgroundCalls()
        shared = RouterServices(
            self.table,
            client,
            prefixes,
            background_calls,
            metrics,
            self._local_tokens,
            True,
            False,
            0.0,
            deaths,
            budget,
            budget,
            looks=Spacing(0.0),
            request_log=request_log,
            session_notes=SessionNoter(client, background_calls),
        )
        nodes = {model: self.table.add(ModelNodes(ModelName(model, ()))) for model in fleet.shape.models}
        self._clusters = {model: ModelCluster(each, shared) for model, each in nodes.items()}
        self._taken = Counter[tuple[str, bool]]()

    async def choose(self, run: Run) -> Choice | None:
        ask, cluster = run.ask, self._clusters[run.ask.model]
        seats, left_s = cluster.capacity().sequences, self._time_left_s(run)
        if seats and self._before(ask) >= seats and (ask.background or not run.delivered):
            if left_s < 0:
                raise too_late(-left_s)
            return None
        request = self._requests.get(run) or self._request(run, cluster)
        if request.waits and not cluster.displacement.may_try(request):
            return None
        hashes = ask.hashes[: run.length // self._fleet.shape.machine.block_size]
        demand = Demand(run.length, recovers=bool(run.delivered), itl_s=self._itl_s(ask))
        try:
            held = await cluster.reuse({group.fingerprint: hashes for group in cluster.model.groups}, {})
            placement = request.place(demand, held, cluster.model.groups, left_s)
        except TargetMissed:
            raise
        except (NoNodes, Overloaded):
            return None
        if placement is None:
            return None
        if placement.promised_s > left_s:
            raise too_late(placement.promised_s - left_s)
        nodes = self._fleet.nodes
        assert placement.decode
        prefill = nodes[placement.prefill.node_id] if placement.prefill else None
        decode = nodes[placement.decode.node_id]
        self._taken[ask.model, ask.background] += 1
        uncached = max(0, run.length - placement.cached_len)
        blocks = decode.machine.blocks_for(run.length + 1)
        reserved = [self._entry(decode).reserve(0 if prefill else uncached, blocks, _ignore_loss)]
        if prefill:
            reserved.insert(0, self._entry(prefill).reserve(uncached, 0, _ignore_loss))
        self._bookings[run] = reserved
        request.runs_on([self._entry(node).key for node in (prefill, decode) if node])
        computing = self._entry(prefill or decode)
        self._expected[run] = cluster.inflight_prefixes.sent(hashes, computing.key)
        return Choice(prefill, decode)

    def _before(self, ask: TraceRequest) -> int:
        """Return how many placed requests come before this one: background requests give way to all others."""
        return self._taken[ask.model, False] + (self._taken[ask.model, True] if ask.background else 0)

    def _request(self, run: Run, cluster: ModelCluster) -> RequestTargets:
        """Return a new request's targets; one without targets can be displaced by requests that have them."""
        ask, now = run.ask, run.arrived
        first_by = inf if self._targets is None or ask.background else now + self._targets.first_s(run)
        call = RequestContext(
            str(ask.number), now, inf, first_by=first_by, itl_s=self._itl_s(ask), is_background=ask.background
        )
        displace = partial(self._displace, run)
        made = self._requests[run] = RequestTargets(call, cluster, Delivered(run), displace, lambda _: None)
        return made

    def _itl_s(self, ask: TraceRequest) -> float:
        return self._targets.itl_s if self._targets and ask.output_len > 1 and not ask.background else inf

    def _displace(self, run: Run) -> None:
        """Release all that a displaced request holds; `displaced` then reports it."""
        self._release(run)
        self._displaced.append(run)

    def displaced(self) -> Sequence[Run]:
        found, self._displaced = self._displaced, []
        return found

    def _time_left_s(self, run: Run) -> float:
        """Return the seconds until a new request's first token is due; infinite without targets."""
        if self._targets is None or run.delivered or run.ask.background:
            return inf
        return run.arrived + self._targets.first_s(run) - self._fleet.clock.now

    def launched(self, run: Run) -> None:
        """Ignored: `choose` made the reservations."""

    def first_token(self, run: Run) -> None:
        self._expected[run].remove()
        self._clusters[run.ask.model].worth.record(max(0, run.cached_len), run.length)
        if run.prefill is not None:
            self._bookings[run][0].settle()

    def decoding(self, run: Run) -> None:
        bookings = self._bookings[run]
        bookings[-1].settle()
        if run.prefill is not None:
            bookings[0].release()

    def ended(self, run: Run) -> None:
        self._release(run)
        if request := self._requests.pop(run, None):
            request.end()

    def _release(self, run: Run) -> None:
        """Release all that an attempt holds."""
        for booking in self._bookings.pop(run, ()):
            booking.release()
        self._expected.pop(run).remove()
        self._taken[run.ask.model, run.ask.background] -= 1
        self._requests[run].runs_on(())

    async def poll(self) -> None:
        await self.table.refresh()
        for entry in self.table.entries.values():
            node = self._fleet.nodes[entry.key[0]]
            if not entry.open and node.alive and node.epoch == entry.key[1]:
                entry.opened()

    def lost(self, node: Node) -> None:
        entry = self.table.entries.get((node.name, node.epoch))
        if entry is not None:
            entry.broken(NodeLost(f"{node.name} died"))

    def _entry(self, node: Node) -> NodeEntry:
        return self.table.entries[(node.name, node.epoch)]


def _ignore_loss(error: NodeLost) -> None:
    """Ignore a lost node, since the simulated cluster reports losses itself."""

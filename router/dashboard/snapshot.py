"""SnapshotBuilder: builds the dashboard's State from the node table, metrics and request log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from kvferry.placement.types import NodeKey, Pair
from kvferry.protocol.labels import NODE_ROLES
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.version import VERSION
from kvferry.router.dashboard.history import History, sums, total
from kvferry.router.dashboard.state import Attainment, Blocks, Event, Node, RequestSummary, State, Suspect, Transfer
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.nodes.circuit_breakers import RemainingPauses
from kvferry.router.nodes.node_entry import NodeEntry
from kvferry.router.request_log import LoggedEvent, RequestLog, RequestRecord, Shipped

T = TypeVar("T")

NODES, RUNNING, RECENT, EVENTS = 256, 20, 40, 40
"""Maximum number of shown nodes, running requests, recent requests and events."""
TRANSFERS_S = 20.0
"""Period of the shown ships, in seconds; shorter if the request log dropped some of them."""


class SnapshotBuilder:
    """Builder of one router's snapshots.

    `state` works on demand, in proportion to the shown items. Only the counters are read every few seconds, within
    `running`."""

    def __init__(self, cluster: RouterCluster, metrics: RouterMetrics) -> None:
        self._cluster, self._metrics = cluster, metrics
        self._history = History(metrics, cluster.request_log.clock)
        self._known: dict[NodeKey, str] = {}
        self._roles: dict[NodeKey, str] = {}
        cluster.nodes.listen(self._log_changes)

    def running(self) -> AbstractAsyncContextManager[None]:
        """Record readings of the counters until the end of the block."""
        return self._history.running()

    def state(self, viewer: str | None = None) -> State:
        """Return the current state.

        `viewer` is the tenant that requests it and sees no names of other tenants' requests; None sees all names."""
        table, request_log = self._cluster.nodes, self._cluster.request_log
        now = request_log.clock()
        pauses = table.breakers.remaining()
        points, counted = self._history.growth()
        ships, transfers_s = _ships(request_log, now)
        entries = sorted(table.entries.values(), key=lambda entry: (NODE_ROLES.index(entry.lease.role), entry.key))
        running = list(request_log.running)
        return State(
            router=self._cluster.router_id,
            version=VERSION,
            up_s=now - request_log.began,
            registry=table.registry_health.up,
            models=[model.name.first for model in table.models],
            queued=int(total(self._metrics.queued, "")),
            nodes=list(self._nodes(entries[:NODES], pauses)),
            nodes_total=len(entries),
            points=points,
            total=counted,
            transfers=_busiest([*ships, *_sent(entries)]),
            transfers_s=transfers_s,
            running=[_summary(record, now, viewer) for record in running[:RUNNING]],
            running_total=len(running),
            recent=[_summary(record, now, viewer) for record in _latest(request_log.recent, RECENT)],
            events=[_event(note, now, viewer) for note in _latest(request_log.notes, EVENTS)],
            suspects=list(_suspects(pauses)),
            targets=Attainment.of(self._targets(viewer)),
        )

    def _targets(self, viewer: str | None) -> Iterator[Attainment]:
        """Yield the counters of targets that the viewer may see, one by one."""
        for target, counter in (("ttft", self._metrics.ttft_targets), ("itl", self._metrics.itl_targets)):
            for key, count in sums(counter, "tenant", "outcome").items():
                tenant, outcome = key.split(" ")
                if count and not _hidden(tenant, viewer):
                    yield Attainment(tenant=tenant, target=target, **{outcome: count})

    def _nodes(self, entries: Iterable[NodeEntry], pauses: RemainingPauses) -> Iterator[Node]:
        states = self._states()
        models = {each.key: model.name.first for model in self._cluster.nodes.models for each in model.live}
        for entry in entries:
            lease, load = entry.lease, entry.lease.load
            yield Node(
                id=lease.node_id,
                role=lease.role,
                model=models.get(entry.key, lease.model),
                state=states[entry.key],
                trouble=_node_trouble(entry, pauses),
                blocks=Blocks(
                    active=load.active_blocks,
                    cached=load.cached_blocks,
                    granted=load.granted_blocks,
                    free=load.free_blocks,
                    total=load.total_blocks,
                ),
                running=load.running_requests,
                most_running=lease.max_num_seqs,
                waiting=load.waiting_requests,
                waiting_tokens=load.waiting_tokens,
                streams=len(entry.listeners) if lease.role == "decode" else len(entry.reservations),
                prefill_tokens_per_s=lease.rates.prefill_tokens_per_s,
                step_s=lease.rates.step_s,
                ship_bytes_per_s=lease.rates.ship_bytes_per_s,
            )

    def _states(self) -> dict[NodeKey, str]:
        """Return the states of all nodes of served models, as in the metrics."""
        return {key: entry.lease.state for key, entry in self._cluster.nodes.entries.items()}

    def _log_changes(self) -> None:
        """Log the differences to the last known nodes."""
        states, request_log = self._states(), self._cluster.request_log
        for key, state in states.items():
            if key not in self._known:
                request_log.node("joined", key[0], state)
            elif self._known[key] != state:
                request_log.node(state, key[0], f"was {self._known[key]}")
        for node_id, epoch in self._known.keys() - states.keys():
            restarted = any(other == node_id and later > epoch for other, later in states)
            request_log.node("lost", node_id, "another process has its name" if restarted else "its lease ended")
        roles = {key: entry.lease.role for key, entry in self._cluster.nodes.entries.items()}
        for key in roles.keys() & self._roles.keys():
            if roles[key] != self._roles[key]:
                request_log.node("role", key[0], f"{roles[key]}, was {self._roles[key]}")
        self._known, self._roles = states, roles


def _node_trouble(entry: NodeEntry, pauses: RemainingPauses) -> str:
    if entry.stalled:
        return "stalled"
    if not entry.reachable:
        return "unreachable"
    if entry.key in pauses.nodes:
        return "suspected"
    return "quarantined" if {(entry.key, None), (None, entry.key)} & pauses.quarantined.keys() else ""


def _ships(request_log: RequestLog, now: float) -> tuple[list[Transfer], float]:
    """Return the ships by pair, and the period in seconds that they cover."""
    ships = list(request_log.ships)
    full = len(ships) == request_log.ships.maxlen
    seconds = min(TRANSFERS_S, now - ships[0].at) if full else TRANSFERS_S
    found: dict[tuple[str, str], list[Shipped]] = {}
    for ship in ships:
        if now - ship.at <= seconds:
            found.setdefault((ship.prefill, ship.decode), []).append(ship)
    rows = [
        Transfer(
            source=prefill,
            target=decode,
            transfers=len(each),
            blocks=sum(ship.blocks for ship in each),
            bytes_per_s=sum(ship.size for ship in each) / max(seconds, 1e-3),
            seconds=sum(ship.seconds for ship in each) / len(each),
        )
        for (prefill, decode), each in found.items()
    ]
    return rows, seconds


def _sent(entries: Iterable[NodeEntry]) -> Iterator[Transfer]:
    """Yield the copies and moves that nodes report."""
    for entry in entries:
        for row in entry.lease.sent:
            yield Transfer(
                kind=row.kind,
                source=entry.lease.node_id,
                target=row.node_id,
                transfers=row.transfers,
                blocks=row.blocks,
                bytes_per_s=row.bytes_per_s,
            )


def _busiest(transfers: list[Transfer]) -> list[Transfer]:
    """Return the transfers with the most bytes, ships before copies and moves."""
    return sorted(transfers, key=lambda each: (each.kind != "ship", -each.bytes_per_s))[:NODES]


def _latest(items: Sequence[T], limit: int) -> list[T]:
    return [items[-i] for i in range(1, min(limit, len(items)) + 1)]


def _hidden(tenant: str, viewer: str | None) -> bool:
    return viewer is not None and tenant != viewer


def _summary(record: RequestRecord, now: float, viewer: str | None) -> RequestSummary:
    hidden = _hidden(record.tenant, viewer)
    return RequestSummary(
        id="" if hidden else record.request_id,
        tenant="" if hidden else record.tenant,
        model=record.model,
        work=record.work,
        prefill=record.prefill,
        decode=record.decode,
        prompt=record.prompt,
        cached=record.cached,
        output=record.output,
        queued_s=record.began - record.arrived,
        first_token_s=None if record.first_at is None else record.first_at - record.arrived,
        seconds=(record.ended_at if record.outcome else now) - record.arrived,
        ago_s=now - record.ended_at if record.outcome else None,
        retries=record.retries,
        outcome=record.outcome or "running",
    )


def _event(note: LoggedEvent, now: float, viewer: str | None) -> Event:
    hidden = bool(note.request_id) and _hidden(note.tenant, viewer)
    return Event(
        ago_s=now - note.at,
        kind=note.kind,
        nodes=list(note.nodes),
        told="" if hidden else note.detail,
        request="" if hidden else note.request_id,
        tenant="" if hidden else note.tenant,
    )


def _suspects(pauses: RemainingPauses) -> Iterator[Suspect]:
    for (node_id, _), seconds in pauses.nodes.items():
        yield Suspect(kind="node", prefill=node_id, decode="", seconds=seconds)
    for kind, pairs in (("ships", pauses.pairs), ("quarantine", pauses.quarantined)):
        for pair, seconds in pairs.items():
            yield Suspect(kind=kind, prefill=_name(pair, 0), decode=_name(pair, 1), seconds=seconds)


def _name(pair: Pair, side: int) -> str:
    key = pair[side]
    return key[0] if key else ""

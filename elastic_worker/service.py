"""ElasticService: services of both roles over one engine and pool; the current role gets the engine events.

A role changes only when none of its work is running (`worker.roles`), so the inactive service has no state. Work that
is independent of the role always continues: keeping replicas, fetching, reading tiers and supplying other nodes."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.decode_worker.service import DecodeService
from kvferry.engine.events import Event
from kvferry.prefill_worker.service import PrefillService
from kvferry.protocol.messages import CancelRequest
from kvferry.worker.endpoints import Endpoints
from kvferry.worker.service import NodeParts, Service


class ElasticService:
    """Service of an elastic node: passes engine events to the service of the current role.

    Implements `worker.service.Service`."""

    def __init__(self, base: NodeParts) -> None:
        self._roles, self.endpoints = base.roles, Endpoints(base)
        self.prefill = PrefillService(base, self.endpoints)
        self.decode = DecodeService(base, self.endpoints)
        self._halves: dict[str, Service] = {"prefill": self.prefill, "decode": self.decode}

    def to_link(self, events: Sequence[Event]) -> None:
        self._halves[self._roles.computing].to_link(events)

    def to_routers(self, events: Sequence[Event]) -> None:
        self._halves[self._roles.now].to_routers(events)

    def cancel(self, cancel: CancelRequest) -> None:
        for half in self._halves.values():
            half.cancel(cancel)

    def busy(self) -> bool:
        return any(half.busy() for half in self._halves.values())

    def router_lost(self, router_id: str) -> None:
        for half in self._halves.values():
            half.router_lost(router_id)

    def stop(self) -> None:
        for half in self._halves.values():
            half.stop()

"""Leak detector: how long the oldest block hold has outlasted its cause, by a leak or by a link that stays busy."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable

from kvferry.engine.block_interfaces import GRANT, REQUEST, SHIP
from kvferry.engine.engine import Engine
from kvferry.engine.request_states import State


class LeakDetector:
    """Leak detector, run now and then on the engine thread.

    seconds: age of the oldest such hold, as of the last check; 0 if there is none. Readable from any thread."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self._engine, self._clock = engine, clock
        self._since: dict[tuple[str, Hashable], float] = {}

    def check(self) -> None:
        """Check the holds."""
        now, causes = self._clock(), self._causes()
        orphaned = [hold for hold in self._engine.pool.holds.owners() if hold not in causes]
        self._since = {hold: self._since.get(hold, now) for hold in orphaned}
        self.seconds = now - min(self._since.values(), default=now)

    def _causes(self) -> set[tuple[str, Hashable]]:
        """Return the causes for which blocks may be held now.

        A failed grant, and a transfer whose request has ended, should become quiet soon."""
        engine = self._engine
        grants: Iterable[Hashable] = [request.grant for request in engine.request_table if request.grant is not None]
        sent = [
            t for t, request in engine.transfer_holds.ships.items() if request.state not in (State.MOVING, State.DONE)
        ]
        return {
            *((REQUEST, request.key) for request in engine.request_table),
            *((GRANT, grant) for grant in (*grants, *engine.copies.landing)),
            *((SHIP, ("ship", transfer)) for transfer in (*sent, *engine.moving.open, *engine.copies.transfer_holds)),
            *(engine.canary.holds if engine.canary else ()),
        }

"""Whether the threads of a node live and move."""

from __future__ import annotations

import time

from engine.loop import EngineLoop
from kv_transfer.ucx import UcxLink
from node.rates import RateMeter

HANG_S = 60.0
"""A turn of the engine, or a round of the link, that takes longer does not come back. Rounds take milliseconds, turns
seconds at most; this leaves room for a machine that stands still for a moment."""
SLOW = 10.0
"""A turn may take this many times what its tokens should, at the learned rate: large steps of large models on few cores
are long, and their attention is longer at the end of a long prompt."""


class Vitals:
    """`fault` says why the process should be restarted, if it should. `budget`: most tokens of a step."""

    def __init__(self, engine: EngineLoop, link: UcxLink, budget: int, rates: RateMeter) -> None:
        self._engine, self._link, self._budget, self._rates = engine, link, budget, rates

    @property
    def fault(self) -> str | None:
        """What has ended comes before what hangs."""
        if self._link.fault is not None:
            return f"the link thread ended: {self._link.fault}"
        return self._engine.fault or self._hang()

    def _hang(self) -> str | None:
        turn_s, round_s = self._engine.turn_s, time.monotonic() - self._link.heartbeat
        if turn_s > max(HANG_S, SLOW * self._budget / self._rates.rates.prefill_tokens_per_s):
            return f"a turn of the engine has taken {turn_s:.0f} s"
        if round_s > HANG_S:
            return f"a round of the link has taken {round_s:.0f} s"
        return None

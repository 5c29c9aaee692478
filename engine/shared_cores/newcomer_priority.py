"""NewcomerPriority: pauses decode briefly while prefill computes the prompt of a low-use tenant on the same cores.

Two processes that compute on the same cores at once are slower than one after the other, since threads wait by
spinning. A prompt that competes with many streams gets little of the cores. A newcomer's tenant has used less than the
tenants of running streams, so its prompt has the cores first and the streams pause until it has arrived. Pauses are
bounded: steps earn them."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.engine.request_table import RequestTable

MAX_PAUSE_S = 1.5
"""Longest pause of running streams, in seconds."""
MAX_PAUSE_BESIDE_S = 0.1
"""Longest pause between two steps while newcomers' streams run, in seconds."""
EARNED_PER_STEP_S = 7.0
"""Seconds of pause that one second of steps earns: streams keep an eighth of the time."""


class NewcomerPriority:
    """Pauses of one engine's streams for new prompts.

    shares: prompts that arrive by grants are computed on this engine's cores. The engine thread owns it."""

    def __init__(
        self, request_table: RequestTable, *, shares: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request_table, self._shares, self._clock = request_table, shares, clock
        self._allowance_s, self._paused_s = MAX_PAUSE_S, 0.0
        self._since: float | None = None

    def pause_s(self) -> float:
        """Return how long the next step must wait, in seconds, unless events arrive; 0: it may begin."""
        if not self._shares:
            return 0.0
        now = self._clock()
        if self._since is not None:
            self._allowance_s -= now - self._since
            self._paused_s += now - self._since
        pause_s = min(self._allowance_s, self._max_pause_s() - self._paused_s)
        self._since = now if pause_s > 0 else None
        return max(0.0, pause_s)

    def stepped(self, seconds: float) -> None:
        """Record a step's duration."""
        self._since, self._paused_s = None, 0.0
        self._allowance_s = min(MAX_PAUSE_S, max(0.0, self._allowance_s) + EARNED_PER_STEP_S * seconds)

    def _max_pause_s(self) -> float:
        """Return the longest pause before the next step, in seconds.

        It is 0 unless a newcomer's prompt is computed elsewhere, and none here."""
        if not any(r.job.newcomer for r in self._request_table.holding_blocks if r.grant is not None):
            return 0.0
        here = [request for request in self._request_table.running if request.job.newcomer]
        if any(not request.output_len for request in here):
            return 0.0
        return MAX_PAUSE_BESIDE_S if here else MAX_PAUSE_S

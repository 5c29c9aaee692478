"""Short pauses of decode in favour of a new prompt, where prefill and decode processes share the same CPU cores.

Two processes that compute on the same cores at once are slower than one after the other, since threads wait for each
other awake, and a prompt beside a flood of streams gets what these leave. A newcomer's tenant has had less of the
nodes than those whose streams run, so its prompt has the cores first; streams go on as soon as it has come. They never
stand still for long: waiting is paid for by steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.engine.request_table import RequestTable

LONGEST_S = 1.5
"""That streams stand still."""
BRIEF_S = 0.1
"""The same between two steps where streams are newcomers' themselves."""
EARNED = 7.0
"""Seconds of waiting that a second of steps pays for: streams keep an eighth of the time."""


class NewcomerPriority:
    """Pauses of one engine's streams for new prompts.

    shares: whether prompts that come by grants are computed on its cores. Owned by the engine thread."""

    def __init__(
        self, request_table: RequestTable, *, shares: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request_table, self._shares, self._clock = request_table, shares, clock
        self._left_s, self._stood_s = LONGEST_S, 0.0
        self._since: float | None = None

    def pause_s(self) -> float:
        """Return how long the next step must wait, in seconds, unless events arrive; 0: it may begin."""
        if not self._shares:
            return 0.0
        now = self._clock()
        if self._since is not None:
            self._left_s -= now - self._since
            self._stood_s += now - self._since
        pause_s = min(self._left_s, self._most_s() - self._stood_s)
        self._since = now if pause_s > 0 else None
        return max(0.0, pause_s)

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        self._since, self._stood_s = None, 0.0
        self._left_s = min(LONGEST_S, max(0.0, self._left_s) + EARNED * seconds)

    def _most_s(self) -> float:
        """Between two steps: if a newcomer's prompt is computed elsewhere, and none here."""
        if not any(r.job.newcomer for r in self._request_table.seated if r.grant is not None):
            return 0.0
        here = [request for request in self._request_table.running if request.job.newcomer]
        if any(not request.output_len for request in here):
            return 0.0
        return BRIEF_S if here else LONGEST_S

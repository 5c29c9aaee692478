"""Open requests of the API of token ids: their number is bounded, and their outputs wait here to be sent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvferry.protocol.errors import KvferryError, Overloaded, from_body
from kvferry.protocol.messages import StepFrame, TokenDelta

PREFIX = "generate-tokens-"
"""Prefix of a request's id in answers; the rest is the client's id."""
WAITING_PER_SEAT = 4
"""Number of requests that may wait for each one of --max-num-seqs; further ones get status 429."""


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request, from its submission to the end of its answer.

    name: its id in the engine, unique. shown: its id in answers, which clients may use twice."""

    name: str
    shown: str
    ended: bool = False
    aborted: bool = False
    error: KvferryError | None = None
    _deltas: list[TokenDelta] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self) -> list[TokenDelta]:
        """Wait for output and return what was generated since the last call; empty only at the request's end."""
        while not self._deltas and not self.ended:
            self._changed.clear()
            await self._changed.wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    def take(self, delta: TokenDelta) -> None:
        """Append an output; ignore outputs after the end."""
        if not self.ended:
            self._deltas.append(delta)
            self.ended = delta.finish_reason is not None
            self._changed.set()

    def end(self, error: KvferryError | None = None, *, aborted: bool = False) -> None:
        """End the request early; what was generated before can still be read."""
        if not self.ended:
            self.ended, self.error, self.aborted = True, error, aborted
            self._changed.set()


class OpenRequests:
    """All open requests. They belong to the asyncio loop.

    seats: requests that the engine runs at once. `taken` counts the requests, those whose body is still arriving
    included."""

    def __init__(self, router_id: str, seats: int) -> None:
        self._router_id, self._most = router_id, seats * (1 + WAITING_PER_SEAT)
        self._numbers, self._open = itertools.count(1), dict[str, OpenRequest]()
        self.taken = 0

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._open.values()))

    def take_place(self) -> None:
        """Count a request that arrives, until `leave_place`. Raises Overloaded beyond the limit."""
        if self.taken >= self._most:
            raise Overloaded(f"this node already has {self._most} requests of this API", retry_after=1.0)
        self.taken += 1

    def leave_place(self) -> None:
        """Stop counting a request."""
        self.taken -= 1

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Count a request during the `with` block. Raises Overloaded beyond the limit."""
        self.take_place()
        try:
            yield
        finally:
            self.leave_place()

    def new_name(self) -> str:
        """Return a new request id, which no router can have chosen."""
        return f"{self._router_id}-{next(self._numbers)}"

    def add(self, name: str, client_id: str) -> OpenRequest:
        """Add a request with this name."""
        opened = self._open[name] = OpenRequest(name, PREFIX + client_id)
        return opened

    def remove(self, opened: OpenRequest) -> None:
        """Remove a request whose answer has ended."""
        self._open.pop(opened.name, None)

    def named(self, request_id: str) -> list[OpenRequest]:
        """Return the requests with this id, as the client sent it or as answers show it."""
        return [opened for opened in self if opened.shown in (request_id, PREFIX + request_id)]

    def publish(self, frame: StepFrame) -> None:
        """Relay the outputs of one engine turn; outputs of removed requests are dropped."""
        for delta in frame.deltas:
            if (opened := self._open.get(delta.request_id)) is not None:
                opened.take(delta)
        for failed in frame.failed:
            if (opened := self._open.get(failed.request_id)) is not None:
                opened.end(from_body({"error": {"code": failed.code, "message": failed.message}}))

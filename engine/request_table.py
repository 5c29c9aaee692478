"""RequestTable: all requests of an engine by state, the order of the waiting queue, and every transition.

                admitted
    WAITING  ─────────────►  RUNNING      ended:  DONE, or MOVING while the link may touch its blocks (transfer_holds
       ▲ │  ◄─────────────     ▲ │                then makes it DONE), from any of these three
       │ ▼    preempted        │ ▼ to be handed over
    AWAITING  ─────────────────┘ has its blocks, and all conditions are met

A request that must meet conditions before it gets blocks starts AWAITING, and is WAITING when they are met. A request
whose prompt arrives by a grant is WAITING for blocks first, then AWAITING."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter

from kvferry.engine.request import Key, Request, held_blocks, resumed, to_compute
from kvferry.engine.request_states import Awaits, State

PLACE = attrgetter("place")
"""Sort key of the queues."""


class RequestTable:
    """All requests of an engine: waiting, awaiting and running.

    The scheduler owns the blocks. The engine thread owns this table.

    waiting   in the order of admission, by `Request.place`. Streams that began, here or on a lost node, come first,
              because their clients notice each pause. Attempts that failed or were refused before come next, so that
              none is refused for ever. Then come prompts: first those of tenants that have used little (newcomers),
              then by fair queuing, as if all that wait shared the node's tokens equally. So a short prompt passes many
              long ones, and a long one is passed only until it would have had its share
    awaiting  with blocks (`seated` counts them) or without
    running   in the order in which they began
    shared    virtual time of fair queuing: tokens that each waiting prompt would have had so far. A prompt is due
              once this time has advanced by the number of tokens that it lacks here
    left      called with each request that ended or lost its blocks
    """

    def __init__(self) -> None:
        self.left: Callable[[Request], None] = lambda request: None
        self.waiting: list[Request] = []
        self.awaiting: dict[Key, Request] = {}
        self.running: list[Request] = []
        self._attempts: dict[str, dict[int, Request]] = {}
        self._grants: dict[Hashable, Request] = {}
        self._queued_tokens = 0
        self._entered, self.shared = 0, 0.0

    def __iter__(self) -> Iterator[Request]:
        return (request for attempts in self._attempts.values() for request in attempts.values())

    def __bool__(self) -> bool:
        return bool(self._attempts)

    @property
    def busy(self) -> bool:
        """Return whether any request waits for something other than a transfer. May be called from any thread."""
        return bool(self.running or self.waiting) or len(self.awaiting) > len(self._grants)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens queued or begun and not yet computed, less those found in the cache on arrival."""
        return self._queued_tokens + sum(r.uncomputed for r in self.running if not r.decodes)

    @property
    def holding_blocks(self) -> list[Request]:
        """Return requests that have their blocks and cannot run yet."""
        return [request for request in self.awaiting.values() if request.block_ids]

    def attempts(self, request_id: str, upto: int) -> list[Request]:
        """Return a request's attempts up to and including `upto`."""
        return [request for attempt, request in self._attempts.get(request_id, {}).items() if attempt <= upto]

    def find(self, key: Key) -> Request | None:
        """Return the request with the key, or None."""
        return self._attempts.get(key[0], {}).get(key[1])

    def by_grant(self, grant: Hashable) -> Request | None:
        """Return the request whose prompt arrives by that grant."""
        return self._grants.get(grant)

    def enter(self, request: Request) -> None:
        """Add a new request; a fork waits until its parent's prompt has arrived by a grant."""
        siblings = self._attempts.get(request.job.fork_of, {}).values() if request.grant is None else ()
        request.behind = next((sibling for sibling in siblings if sibling.grant is not None), None)
        if request.behind is not None:
            request.awaits.add(Awaits.KV)
        attempts = self._attempts.setdefault(request.job.request_id, {})
        assert request.job.attempt not in attempts, request.key
        attempts[request.job.attempt] = request
        self._entered += 1
        due = self.shared + request.lacking
        request.place = (not request.output_len, -request.job.failures, not request.job.newcomer, due, self._entered)
        self._queued_tokens += to_compute(request)
        if request.grant is not None:
            self._grants[request.grant] = request
        if request.awaits and request.grant is None:
            self._await(request)
        else:
            insort(self.waiting, request, key=PLACE)

    def admit(self, place: int) -> None:
        """Record that the request at position `place` of the queue has its blocks."""
        request = self.waiting[place]
        del self.waiting[place]
        self._queued_tokens -= to_compute(request)
        if request.awaits:
            self._await(request)
        else:
            self._run(request)

    def landed(self, request: Request) -> None:
        """Record that the grant's blocks have arrived."""
        share(self, request.lacking)
        del self._grants[request.grant]
        request.grant, request.held_for_transfer = None, False
        self.resume(request, Awaits.KV)
        self._wake(request)

    def resume(self, request: Request, awaited: Awaits) -> None:
        """Record that a condition is met; the request continues unless it awaits another one.

        Without blocks it returns to its old place in the queue."""
        request.awaits.discard(awaited)
        if request.awaits or request.state is not State.AWAITING:
            return
        del self.awaiting[request.key]
        if request.block_ids:
            self._run(request)
            return
        request.move(State.WAITING)
        insort(self.waiting, request, key=PLACE)

    def preempt(self, request: Request) -> None:
        """Move a request that lost its blocks back to the queue, before those that never had any."""
        self.running.remove(request)
        self.left(request)
        request.move(State.WAITING)
        request.place = (False, *request.place[1:])
        insort(self.waiting, request, key=PLACE)
        self._queued_tokens += to_compute(request)

    def leave(self, request: Request) -> None:
        """Remove a request that ended here."""
        self.left(request)
        if request.state is State.RUNNING:
            self.running.remove(request)
        elif request.state is State.WAITING:
            self.waiting.remove(request)
            self._queued_tokens -= to_compute(request)
        else:
            del self.awaiting[request.key]
            self._queued_tokens -= 0 if request.block_ids else to_compute(request)
        request.move(State.MOVING if request.held_for_transfer else State.DONE)
        if request.grant is not None:
            del self._grants[request.grant]
            self._wake(request)
        attempts = self._attempts[request.job.request_id]
        del attempts[request.job.attempt]
        if not attempts:
            del self._attempts[request.job.request_id]

    def _await(self, request: Request) -> None:
        request.move(State.AWAITING)
        self.awaiting[request.key] = request

    def _wake(self, request: Request) -> None:
        """Resume requests that wait behind this one: its blocks are here, or will not come."""
        for other in [other for other in self.awaiting.values() if other.behind is request]:
            other.behind = None
            self.resume(other, Awaits.KV)

    def _run(self, request: Request) -> None:
        request.move(State.RUNNING)
        self.running.append(request)


def pause(request_table: RequestTable, request: Request, awaited: Awaits) -> None:
    """Suspend a running request until the condition is met; it keeps its blocks."""
    request_table.running.remove(request)
    request.awaits.add(awaited)
    request_table._await(request)


def suspend(request_table: RequestTable, place: int, awaited: Awaits) -> None:
    """Let the request at position `place` of the queue wait for a condition before it can have blocks."""
    request = request_table.waiting.pop(place)
    request.awaits.add(awaited)
    request_table._await(request)


def expect(request_table: RequestTable, request: Request, tokens: int) -> None:
    """Update how many tokens a queued request without blocks lacks."""
    request_table._queued_tokens -= to_compute(request)
    request.lacking = tokens
    request_table._queued_tokens += to_compute(request)


def share(request_table: RequestTable, tokens: int, prompts: int = 0) -> None:
    """Advance fair queuing's time by tokens that waiting prompts and `prompts` running ones share."""
    request_table.shared += tokens / max(1, len(request_table.waiting) + prompts)


def arriving(request_table: RequestTable) -> int:
    """Return the blocks that are held for new prompts until those arrive by grants."""
    coming = (r for r in request_table.awaiting.values() if r.grant is not None and not resumed(r))
    return sum(len(held_blocks(r)) - r.first_block for r in coming if r.block_ids)


def check_integrity(request_table: RequestTable) -> None:
    """Assert that states, places and counts agree."""
    places = (
        (State.WAITING, request_table.waiting),
        (State.AWAITING, request_table.awaiting.values()),
        (State.RUNNING, request_table.running),
    )
    for state, requests in places:
        for request in requests:
            assert request.state is state, f"{request.key} is {request.state} among the {state}"
            assert request_table.find(request.key) is request, f"{request.key} is not found by its name"
            assert bool(request.awaits) == (state is State.AWAITING) or request.grant is not None, request.key
            assert bool(request.block_ids) or state is not State.RUNNING, f"{request.key} runs without blocks"
    assert request_table.waiting == sorted(request_table.waiting, key=PLACE), "the queue is not in order"
    count = len(request_table.waiting) + len(request_table.awaiting) + len(request_table.running)
    assert count == sum(map(len, request_table._attempts.values())), "a request is lost, or in two places"
    grants = {request.grant for request in request_table if request.grant is not None}
    assert grants == request_table._grants.keys(), "grants and their requests differ"
    queued = sum(to_compute(r) for r in request_table if not r.block_ids)
    assert request_table._queued_tokens == queued, (
        f"{request_table._queued_tokens} queued tokens are counted, but there are {queued}"
    )

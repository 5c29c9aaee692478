"""ChoiceMerge: starts all choices of a request, later ones as forks of the first, and merges their streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvferry.router.api.sequence_stream import Choice, ChoicePiece, Listener, SequenceStream, TextWriter
from kvferry.router.dispatch.timers import EventQueue
from kvferry.router.text.transcript import Piece

STARTS_PER_TURN = 16
"""Number of dispatches started before other requests get a turn of the event loop."""


class ChoiceMerge:
    """Merged stream of all choices of a request.

    Raises the KvferryError of the first dispatch that fails. The caller must call `aclose`.

    groups   choices of each prompt; the first starts first, and its first token starts the other choices as forks
    follow   starts a choice
    at_once  maximum number of dispatches in flight
    """

    def __init__(
        self, groups: Sequence[Sequence[Choice]], follow: Callable[[Choice], SequenceStream], at_once: int
    ) -> None:
        self._groups, self._follow = groups, follow
        self._left = sum(map(len, groups))
        self._room = asyncio.Semaphore(at_once)
        self._inbox: EventQueue[tuple[Choice, Piece | Exception]] = EventQueue()
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def __aiter__(self) -> ChoiceMerge:
        return self

    async def __anext__(self) -> ChoicePiece:
        if not self._left:
            raise StopAsyncIteration
        if not self._tasks:
            await self._start()
        choice, item = await self._inbox.next()
        if isinstance(item, Exception):
            try:
                raise item
            finally:
                del item  # the traceback refers to this frame
        self._left -= item.finish_reason is not None
        return choice, item

    def listen(self, listener: Listener | None, _: TextWriter | None = None) -> None:
        """Set or remove the listener; see SequenceStream.listen. Every choice makes pieces."""
        self._listener = listener

    async def aclose(self) -> None:
        """End all running dispatches, and release tasks and errors, which keep their frames alive."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._left = 0
        self._tasks.clear()
        self._inbox = EventQueue()

    async def _start(self) -> None:
        for number, (leader, *followers) in enumerate(self._groups, start=1):
            self._tasks.add(asyncio.create_task(self._pump(leader, followers)))
            if number % STARTS_PER_TURN == 0:
                await asyncio.sleep(0)

    async def _pump(self, choice: Choice, followers: Sequence[Choice] = ()) -> None:
        try:
            async with self._room:
                pieces = self._follow(choice)
                pieces.listen(self._receive)
                async for found in pieces:
                    self._inbox.post(found)
                    for follower in followers:
                        assert choice.dispatch
                        follower.spec = replace(follower.spec, fork_of=choice.dispatch.fork)
                        self._tasks.add(asyncio.create_task(self._pump(follower)))
                    followers = ()
        except Exception as error:
            self._inbox.post((choice, error))

    def _receive(self, choice: Choice, piece: Piece) -> None:
        """Pass on a piece that arrived without waking its choice's task."""
        if self._listener is not None and self._inbox.awaited:
            self._listener(choice, piece)
        else:
            self._inbox.post((choice, piece))

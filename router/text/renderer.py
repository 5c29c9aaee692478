"""Renderer: renders chat templates for requests: small cheap prompts in the router, all others in child processes.

A child renders one prompt at a time. It is killed when the prompt takes too long, and another one is started when
needed, so a template that takes all time or memory fails only its own request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvferry.protocol.errors import InvalidRequest, Overloaded
from kvferry.router.text.async_render_child import AsyncRenderChild
from kvferry.router.text.render_child import START_S
from kvferry.router.text.render_frames import DEADLINE_S, ERROR, MAX_ERROR_CHARS, READY, TEXT, TOO_LONG, longest_text
from kvferry.router.text.render_slots import FAST_PLACES, SLOW_AFTER_S, Place, RenderSlots
from kvferry.router.text.rendering import Rendering
from kvferry.router.text.template import ChatTemplate

T = TypeVar("T")

log = logging.getLogger("kvferry.router.text")

_TRIES = 2
"""Maximum number of child processes that a prompt may crash; the first may have ended for another reason."""
_NICENESS = 10
"""Niceness of a child with a slow rendering."""


class Renderer:
    """Renderer of one model; starts processes when needed and ends them in `close`. Call it on the event loop only."""

    def __init__(self, template: ChatTemplate | None, deadline_s: float = DEADLINE_S) -> None:
        self._template = template
        self._deadline_s = deadline_s
        self._slots = RenderSlots()
        self._idle: list[AsyncRenderChild] = []
        self._children: set[AsyncRenderChild] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def render(self, rendering: Rendering, tenant: str = "") -> str:
        """Return the text of a prompt.

        Raises InvalidRequest if the template refuses it or takes too much memory or time, and Overloaded if too many
        prompts wait."""
        assert self._template is not None
        text = self._template.render_here(rendering)
        if text is not None:
            return rendering.finished(text)
        place = await self._slots.enter(tenant, len(rendering.frame))
        # a child continues when its client disconnects
        return await asyncio.shield(self._started(self._placed(rendering, place)))

    @property
    def children(self) -> list[int]:
        """Return the ids of the processes that run."""
        return [child.pid for child in self._children]

    async def close(self) -> None:
        """End all processes. Callers that still wait get an error."""
        self._closed = True
        for child in list(self._children):
            self._end(child)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _started(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _placed(self, rendering: Rendering, place: Place) -> str:
        try:
            for _ in range(_TRIES):
                try:
                    return await self._tried(rendering, place)
                except EOFError:  # idle processes may have been killed with it
                    while self._idle:
                        self._end(self._idle.pop())
            raise rendering.died()
        finally:
            self._slots.leave(place)

    async def _tried(self, rendering: Rendering, place: Place) -> str:
        """Return the text from one child process; raise EOFError if the process ends."""
        child, kept, refused = await self._ready(), False, False

        def slow_down() -> None:
            nonlocal refused
            refused = not place.slow and not self._slots.move_to_slow(place)
            if refused:
                self._end(child)
            else:
                _yield_cores(child)

        timer = asyncio.get_running_loop().call_later(SLOW_AFTER_S, slow_down)
        try:
            async with asyncio.timeout(self._deadline_s):
                kind, text = await child.ask(rendering.frame, 4 * longest_text(len(rendering.frame)) + 1)
            kept = kind in (TEXT, ERROR, TOO_LONG) and not place.slow
            return rendering.outcome(kind, text)
        except TimeoutError:
            raise rendering.late(self._deadline_s) from None
        except EOFError:
            if refused:
                raise Overloaded("other prompts that take long are being rendered", retry_after=1) from None
            log.warning("a process that renders prompts of a chat template ended unexpectedly")
            raise
        finally:
            timer.cancel()
            if kept and not self._closed and len(self._idle) < FAST_PLACES:
                self._idle.append(child)
            else:
                self._end(child)

    async def _ready(self) -> AsyncRenderChild:
        """Return an idle process, started if need be; raise Overloaded if none starts."""
        while self._idle:
            child = self._idle.pop()
            if not child.has_ended:
                return child
            self._end(child)
        if self._closed:
            raise Overloaded("this server is shutting down", retry_after=1)
        assert self._template is not None
        try:
            child = await AsyncRenderChild.started()
        except OSError as error:
            raise _unstarted() from error
        self._children.add(child)
        try:
            async with asyncio.timeout(START_S):
                kind, text = await child.ask(self._template.sources, 4 * MAX_ERROR_CHARS)
            if kind != READY:
                raise InvalidRequest(f"the chat template cannot be used: {text}", param="messages")
        except BaseException as error:
            self._end(child)
            if isinstance(error, TimeoutError | EOFError):
                raise _unstarted() from error
            raise
        return child

    def _end(self, child: AsyncRenderChild) -> None:
        if child.end():
            self._started(self._reaped(child))

    async def _reaped(self, child: AsyncRenderChild) -> None:
        await child.reaped()
        self._children.discard(child)


def _unstarted() -> Overloaded:
    return Overloaded("the process that renders prompts did not start", retry_after=1)


def _yield_cores(child: AsyncRenderChild) -> None:
    """Lower the child's scheduling priority, so that other processes run first."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, child.pid, _NICENESS)

"""Eager start of coroutines: `start_eagerly` runs the first step at once, and leaves the rest, if any, for a task."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator, Iterator
from types import coroutine
from typing import Any


class EndedCall:
    """Awaitable of a call that has ended already; it takes no coroutine."""

    def __await__(self) -> Iterator[Any]:
        return iter(())


ENDED: Any = EndedCall()


def start_eagerly(call: Awaitable[None]) -> Coroutine[Any, Any, None] | None:
    """Run the first step of a call; return a coroutine that continues it, for a task, or None if it has ended.

    The first step must not use the current task, as `asyncio.timeout` does. Raises what it raises."""
    if call is ENDED:
        return None
    steps: Any = call.__await__()
    try:
        return _rest(steps, steps.send(None))
    except StopIteration:
        return None


async def _rest(steps: Any, waits: Any) -> None:
    """Continue the steps; since Python 3.12 a task accepts no generator, which `_continued` is."""
    await _continued(steps, waits)


@coroutine
def _continued(steps: Any, waits: Any) -> Generator[Any, Any, None]:
    try:
        while True:
            try:
                sent = yield waits
            except BaseException as error:
                waits = steps.throw(error)
            else:
                waits = steps.send(sent)
    except StopIteration:
        return

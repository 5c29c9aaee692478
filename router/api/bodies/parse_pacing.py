"""Estimates what parsing a request body costs, and delays large ones, source by source (ParsePacing)."""

from __future__ import annotations

import asyncio
from collections import deque

from kvferry.protocol.errors import Overloaded
from kvferry.router.long_work import LongWork

LONG_BYTES, LONG_S = 64 * 1024, 0.006
"""Bodies with fewer bytes or a lower cost in seconds are parsed at once."""
PARSING_SHARE = 0.05
"""Fraction of the event loop's time for long bodies while other requests wait, so that few are delayed by one."""
CREDIT_S = 0.2
"""Parsing time available at once after a pause, in seconds."""
MAX_WAIT_S = 10.0
"""Longest wait of a body for those of its own source, in seconds."""
MAX_SHARED_WAIT_S = 30.0
"""Longest wait of a body for those of all sources, in seconds."""
BYTE_S, VALUE_S, OBJECT_S = 6e-9, 150e-9, 1500e-9
"""Parsing time for each byte, value and object on a slow machine, in seconds."""
MAX_VALUES = 2**20
"""Largest number of values in a body; parsing that many takes 0.1 to 0.3 s, in slices."""
MAX_OBJECTS = 2**15
"""Largest number of lists and objects among the values, most of which are validated one by one."""
COUNT_BYTES = 2**16
"""Bytes of a body that are counted before the event loop runs other work."""
MANY = 64
"""Number of marks in a slice from which searching for each takes longer than removing all other bytes."""
_MARKS = b",{["
_OTHERS = bytes(set(range(256)) - set(_MARKS))
Waiting = tuple[float, asyncio.Future[None]]
"""Cost of a body in seconds, and what it waits for."""


def cost_s(size: int, values: int, objects: int) -> float:
    """Estimate the event loop's time for parsing a JSON body, in seconds.

    Marks beyond the largest numbers are in strings, or the body is refused: they take no time."""
    return size * BYTE_S + min(values, MAX_VALUES) * VALUE_S + min(objects, MAX_OBJECTS) * OBJECT_S


async def measured_s(data: bytes) -> float:
    """Estimate the event loop's time for parsing this body, in seconds."""
    commas, objects, _ = await counted(data)
    return cost_s(len(data), commas, objects)


async def counted(data: bytes) -> tuple[int, int, int]:
    """Return how often `,`, `{` and `[` are in a long body; the event loop runs other work in between.

    The data of images have none of them, so each is searched for first, in a tenth of the time. In other slices,
    removing all other bytes takes half the time of counting these three in the text."""
    found, work = [0, 0, 0], LongWork()
    for at in range(0, len(data), COUNT_BYTES):
        few = [_few(data, mark, at) for mark in _MARKS]
        if max(few) == MANY:
            marks = data[at : at + COUNT_BYTES].translate(None, _OTHERS)
            few = [marks.count(mark) for mark in _MARKS]
        found = [before + more for before, more in zip(found, few, strict=True)]
        await work.pause()
    return found[0], found[1], found[2]


def _few(data: bytes, mark: int, at: int) -> int:
    """Return how often a byte is in a slice, at most MANY."""
    end, count = at + COUNT_BYTES, 0
    while count < MANY and (at := data.find(mark, at, end) + 1):
        count += 1
    return count


class ParsePacing:
    """Pacing of large bodies on one event loop: fair queuing of their costs over sources, each in order of arrival.

    A source's next body has a finish tag: the cost that the source has been given since it began to wait, and that of
    the body, in virtual time. The least tag is next, so a small body of a new source passes the largest of others.
    Every second turn is that of the source that waits longest, so small bodies of new sources starve no large one."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[str, deque[Waiting]] = {}
        """Bodies by source, in the order in which sources began to wait; one that was served begins anew."""
        self._is_oldest_next = False
        self._started: dict[str, float] = {}
        """Virtual time at which the next body of each waiting source starts, in seconds of cost."""
        self._virtual = 0.0
        """Finish tag of the latest body that was parsed."""

    async def turn(self, cost: float, source: str = "") -> None:
        """Wait until a body of this cost (seconds) may be parsed.

        Raises Overloaded if it would wait too long for those of its source alone, or for all that are before it; also
        after MAX_SHARED_WAIT_S, if many more sources came meanwhile."""
        if cost < LONG_S:
            return
        loop = asyncio.get_running_loop()
        own_s, shared_s = self._waits(cost, source)
        if (beyond_s := max(own_s - MAX_WAIT_S, shared_s - MAX_SHARED_WAIT_S)) > 0:
            raise _overloaded(beyond_s)
        if not self._waiting and self._free_at <= loop.time():
            return self._take(cost)
        body = (cost, loop.create_future())
        self._waiting.setdefault(source, deque()).append(body)
        self._started.setdefault(source, self._virtual)
        self._timer = self._timer or loop.call_at(self._free_at, self._next)
        try:
            async with asyncio.timeout(MAX_SHARED_WAIT_S):
                await body[1]
        except TimeoutError:
            own_s, shared_s = self._waits(cost, source)
            raise _overloaded(max(own_s, shared_s)) from None
        finally:
            self._leave(source, body)

    def _waits(self, cost: float, source: str) -> tuple[float, float]:
        """Return how long a new body waits for those of its source alone, and for all before it, in seconds."""
        free_s = max(0.0, self._free_at - asyncio.get_running_loop().time())
        own = sum(each for each, _ in self._waiting.get(source, ()))
        tag, before = self._started.get(source, self._virtual) + own + cost, own
        for other, queue in self._waiting.items():
            finished = self._started[other]
            for each, _ in queue if other != source else ():
                if (finished := finished + each) > tag:
                    break
                before += each
        return free_s + own / PARSING_SHARE, free_s + before / PARSING_SHARE

    def _leave(self, source: str, body: Waiting) -> None:
        """Forget a body that waits no longer; its turn may have come."""
        queue = self._waiting.get(source, deque())
        if body in queue:
            queue.remove(body)
            self._forget_idle(source)

    def _forget_idle(self, source: str) -> None:
        if not self._waiting[source]:
            del self._waiting[source], self._started[source]

    def _next(self) -> None:
        """Let the body with the least finish tag be parsed, every second time that of the source that waits longest."""
        self._timer = None
        if not self._waiting:
            return
        if self._is_oldest_next:
            source = next(iter(self._waiting))
        else:
            source = min(self._waiting, key=lambda each: self._started[each] + self._waiting[each][0][0])
        self._is_oldest_next = not self._is_oldest_next
        queue = self._waiting[source] = self._waiting.pop(source)  # behind the others from now on
        cost, turn = queue.popleft()
        if not turn.done():  # its client has not left just now
            self._started[source] += cost
            self._virtual = max(self._virtual, self._started[source])
            self._take(cost)
            turn.set_result(None)
        self._forget_idle(source)
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_at(self._free_at, self._next)

    def _take(self, cost: float) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - CREDIT_S / PARSING_SHARE) + cost / PARSING_SHARE


def _overloaded(beyond_s: float) -> Overloaded:
    """Return the refusal of a body that would wait this much longer than it may, in seconds."""
    return Overloaded("too many large request bodies are waiting to be parsed", retry_after=beyond_s + 1)

"""How a stream gets away from a node that drains: an heir is found for its attempt, and follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.placement.terms import NodeKey
from kvferry.protocol.errors import Moved
from kvferry.protocol.lease import NodeLease
from kvferry.protocol.messages import Job
from kvferry.router.journey.blame import Failure
from kvferry.router.journey.course import Course
from kvferry.router.journey.events import Drains, Event
from kvferry.router.journey.heir import Heir
from kvferry.router.journey.ports import Ground
from kvferry.router.journey.race import Race
from kvferry.router.nodes.entry import node_key

PAUSE_S = 0.5
"""Before a stream is tried to be moved again: when no node could take it, or the one that was to did not."""


class Succession:
    """Of one journey. The heir is none of the race's runners until the one before it has told all that it made."""

    def __init__(self, race: Race, course: Course, ground: Ground, post: Callable[[Event], None]) -> None:
        self._race, self._course, self._ground, self._post = race, course, ground, post
        self._heir: Heir | None = None
        self._unfit: set[NodeKey] = set()

    def concerns(self, number: int) -> bool:
        """Whether that is the heir's number."""
        return self._heir is not None and self._heir.job.attempt == number

    @property
    def goes_to(self) -> NodeLease | None:
        """Where the heir is to go on with it, if there is one."""
        return self._heir.placement.decode if self._heir else None

    async def begin(self, number: int, make_job: Callable[[str], Job]) -> bool:
        """The node of attempt `number` drains: have it hand its stream over. Whether an heir was made; if not, and
        whenever one fails, it is tried again for as long as the attempt runs there."""
        reuse = await self._course.reuse()
        if self.concerns(number):  # it is asked again once the stream is there
            self._again(number)
        if number not in self._race.runners or self._heir:
            return False
        attempt = self._race.leader
        placement = None
        if attempt is not None and attempt.job.attempt == number and attempt.decoding:
            if attempt.decode_node and not attempt.decode_node.drains:
                return False  # it stays after all
            placement = self._course.onward(attempt.placement, self._unfit, reuse)
        if attempt is None or placement is None:
            self._unfit.clear()
            self._again(number)
            return False
        self._ground.metrics.ladder.labels("move").inc()
        heir = self._ground.launch(make_job(attempt.job.request_id), placement, self._post, attempt)
        assert isinstance(heir, Heir)
        self._heir = heir
        return True

    def settles(self, failure: Failure) -> bool:
        """Whether what ended an attempt is a move, which came about or not, and nothing else is to be done for it. One
        to an earlier heir, which was given up, is a failure like any other."""
        heir = self._heir
        if heir is None:
            return False
        if isinstance(failure.error, Moved) and failure.error.later == heir.job.attempt:
            self._heir = None
            self._race.succeed(failure.attempt, heir)
            self._course.goes_to(self._race.nodes)
            heir.inherit()
            return True
        self.end()
        if failure.attempt != heir.job.attempt:
            return False
        self._unfit.update(map(node_key, failure.culprits))
        if self._race.leader:
            self._again(self._race.leader.job.attempt)
        return True

    def end(self) -> None:
        """Of the journey, or of the attempt: it has no heir."""
        if self._heir:
            self._heir.close(cancel=True)
        self._heir = None

    def _again(self, number: int) -> None:
        asyncio.get_running_loop().call_later(PAUSE_S, self._post, Drains(number))

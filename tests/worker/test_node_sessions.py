"""What routers tell a node about sessions reaches its pool's eviction order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvferry.engine.eviction import ValueEviction
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sessions import MAX_NOTES, TOOL_GROUPS, SessionNotes
from kvferry.protocol.wire import pack
from kvferry.worker.session_notes import NodeSessions
from tests.toy import finish, make_engine, make_job


class Asked:
    """A request with notes in it."""

    def __init__(self, notes: SessionNotes) -> None:
        self._notes = notes

    async def stream(self) -> AsyncIterator[bytes]:
        yield pack(self._notes)


class Loop:
    """The engine thread."""

    def __init__(self) -> None:
        self.engine = make_engine(num_blocks=20)

    def submit(self, call: Any) -> None:
        call(self.engine)


async def test_tool_calls_and_closed_sessions_are_passed_on() -> None:
    loop = Loop()
    node, pool = NodeSessions(loop), loop.engine.pool  # type: ignore[arg-type]
    for name, tokens in (("mine", range(20)), ("other", range(50, 70))):
        job = make_job(name, [*tokens], max_tokens=1)
        loop.engine.add(replace(job, session=name))
        finish(loop.engine)
    assert pool.idle.stats.paused == 2
    await node.post_notes(Asked(SessionNotes(("mine", "unknown"), (3, 0), ("other", "unknown"))))  # type: ignore[arg-type]
    order = pool.idle
    assert isinstance(order, ValueEviction)
    assert {(each.kind, each.closed) for each in order._chains if each} == {("paused", False), ("closed", True)}
    assert pool.idle.stats.paused == 1
    loop.engine.add(make_job("more", [*range(30, 75)], max_tokens=1))
    finish(loop.engine)
    assert pool.idle.stats.evicted["closed"] == 2
    assert pool.idle.stats.evicted["paused"] == 0
    loop.engine.check_integrity()


@pytest.mark.parametrize(
    "notes",
    [SessionNotes(("x",) * (MAX_NOTES + 1), (0,) * (MAX_NOTES + 1)), SessionNotes(closed=("x",) * (MAX_NOTES + 1))],
)
async def test_too_many_notes_are_refused(notes: SessionNotes) -> None:
    with pytest.raises(InvalidRequest, match=str(MAX_NOTES)):
        await NodeSessions(Loop()).post_notes(Asked(notes))  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [(), (1, 2), (-1,), (TOOL_GROUPS + 1,)])
async def test_groups_that_are_none_are_refused(groups: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match=f"0 to {TOOL_GROUPS}"):
        await NodeSessions(Loop()).post_notes(Asked(SessionNotes(("x",), groups)))  # type: ignore[arg-type]

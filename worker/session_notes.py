"""HTTP endpoint for routers' notes about sessions (paused for tools, closed), which the pool's eviction order uses."""

from __future__ import annotations

from fastapi import Request

from kvferry.engine.cache_use import Pause
from kvferry.engine.engine import Engine
from kvferry.engine.loop import EngineLoop
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sessions import MAX_NOTES, TOOL_GROUPS, SessionNotes
from kvferry.runtime.http import read_message


class NodeSessions:
    """Endpoint for notes about sessions, on the asyncio loop."""

    def __init__(self, engine: EngineLoop) -> None:
        self._engine = engine

    async def post_notes(self, request: Request) -> None:
        """Pass notes to the block pool. Raises InvalidRequest for too many notes, or for an invalid tool group."""
        notes = await read_message(request, SessionNotes)
        if max(len(notes.tools), len(notes.closed)) > MAX_NOTES:
            raise InvalidRequest(f"a message holds notes about at most {MAX_NOTES} requests and sessions")
        if len(notes.groups) != len(notes.tools) or not all(0 <= each <= TOOL_GROUPS for each in notes.groups):
            raise InvalidRequest(f"each request has one group of tools, from 0 to {TOOL_GROUPS}")

        def note(engine: Engine) -> None:
            for request_id, tools in zip(notes.tools, notes.groups, strict=True):
                engine.pool.idle.pause(request_id, Pause.TOOL, tools)
            for session in notes.closed:
                engine.pool.idle.close(session)

        self._engine.submit(note)

"""JournalRelay: passes journals of routers that cannot reach the store to it."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, Response

from kvferry.cluster_state.journal_calls import SCRIPTS, JournalScripts
from kvferry.protocol.errors import InvalidRequest, RegistryUnavailable
from kvferry.protocol.relayed_journals import JournalAnswer, JournalCall
from kvferry.protocol.wire import pack
from kvferry.runtime.http import read_message
from kvferry.worker.message_stream import MEDIA_TYPE

ANSWER_S = 0.4
"""Longest time of a call of the store for a router, in seconds; beyond it the router asks another node."""


class JournalRelay:
    """Answers `POST /journals` with the store's answer. Entries are sealed by the router that wrote them."""

    def __init__(self, scripts: JournalScripts) -> None:
        self._scripts = scripts

    def mount(self, app: FastAPI) -> None:
        """Add the endpoint to the app."""
        app.post("/journals")(self.post_journals)

    async def post_journals(self, request: Request) -> Response:
        """Call a script for a router. Raises RegistryUnavailable if the store does not answer this node either."""
        call = await read_message(request, JournalCall)
        if call.script not in SCRIPTS:
            raise InvalidRequest(f"script must be one of {', '.join(SCRIPTS)}", param="script")
        try:
            async with asyncio.timeout(ANSWER_S):
                values = await self._scripts.run(call.script, call.args)
        except TimeoutError as error:
            raise RegistryUnavailable(f"Redis: no answer in {ANSWER_S:g} s") from error
        return Response(pack(JournalAnswer(values)), media_type=MEDIA_TYPE)

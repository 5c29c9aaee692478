"""HTTP endpoints of an adapter for routers and for other adapters."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Request, Response

from kvferry.engine_adapter.attempts import Attempts
from kvferry.engine_adapter.handover_client import HANDOVER_PATH, OFFER_PATH
from kvferry.engine_adapter.handover_receiver import Handovers
from kvferry.engine_adapter.node_state import NodeState
from kvferry.engine_adapter.prefill_attempts import PrefillAttempts
from kvferry.protocol.errors import Cancelled, Draining, Incompatible
from kvferry.protocol.handover_messages import IN_ROOM, Handover, HandoverOffer
from kvferry.protocol.messages import CancelRequest, GenerateRequest, PrefillRequest
from kvferry.protocol.wire import pack
from kvferry.runtime.disconnect import until_disconnect
from kvferry.runtime.http import read_message
from kvferry.worker.media_routes import read_attempt
from kvferry.worker.message_stream import MEDIA_TYPE, MessageStreamResponse


class Endpoints:
    """Endpoints of one node. state: returns its parts; raises Draining while it takes no new work."""

    def __init__(self, node_id: str, state: Callable[[], NodeState | None], draining: Callable[[], bool]) -> None:
        self._node_id, self._state, self._draining = node_id, state, draining

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints of both roles, since an elastic node changes its role."""
        app.post("/attempts/prefill")(self.post_prefill)
        app.post("/attempts/generate", status_code=202)(self.post_generate)
        app.post(OFFER_PATH)(self.post_offer)
        app.post(HANDOVER_PATH)(self.post_handover)
        app.get("/streams/{router_id}")(self.get_stream)
        app.post("/streams/{router_id}/seen", status_code=202)(self.post_seen)
        app.post("/attempts/cancel", status_code=202)(self.post_cancel)

    async def post_generate(self, request: Request) -> None:
        """Begin an attempt; its output goes to the router's stream."""
        job = (await read_attempt(request, GenerateRequest)).job
        attempts = self._ready().attempts
        if not isinstance(attempts, Attempts):
            raise Draining(f"{self._node_id} is a prefill node now")
        attempts.start(job)

    async def post_prefill(self, request: Request) -> Response:
        """Begin an attempt; the response streams FirstToken, then ShipDone or AttemptFailed."""
        message = await read_attempt(request, PrefillRequest)
        attempts = self._ready().attempts
        if not isinstance(attempts, PrefillAttempts):
            raise Draining(f"{self._node_id} is a decode node now")
        attempt = attempts.start(message)
        return MessageStreamResponse(attempt.messages(), on_close=lambda: attempts.abandon(attempt))

    async def post_offer(self, request: Request) -> Response:
        """Give a ticket for a handover."""
        offer = await read_message(request, HandoverOffer)
        return Response(pack(self._handovers().offer(offer)), media_type=MEDIA_TYPE)

    async def post_handover(self, request: Request) -> Response:
        """Begin an attempt whose blocks another engine has; answer once they have come.

        If the prefill node of a room leaves before, the attempt ends: its engine would wait for blocks in vain."""
        handover, handovers = await read_message(request, Handover), self._handovers()
        if handover.first_token != IN_ROOM:
            await handovers.take(handover)
            return Response()
        try:
            left = await until_disconnect(request.receive, handovers.take(handover))
        except Cancelled:
            self._drop(CancelRequest(handover.job.request_id, handover.job.attempt))
            raise
        return Response(pack(left), media_type=MEDIA_TYPE)

    async def get_stream(self, router_id: str, epoch: int, after: int | None = None) -> Response:
        """Serve the standing token stream of a router, of the node's current epoch."""
        return await self._loaded().streams.get_stream(router_id, epoch, after)

    async def post_seen(self, router_id: str, request: Request) -> None:
        """Handle a router's acknowledgement of frames."""
        await self._loaded().streams.post_seen(router_id, request)

    async def post_cancel(self, request: Request) -> None:
        """Drop all attempts of a request up to the given one."""
        self._drop(await read_message(request, CancelRequest))

    def _drop(self, cancel: CancelRequest) -> None:
        if (state := self._state()) is not None:
            state.attempts.cancel(cancel)

    def _loaded(self) -> NodeState:
        if (state := self._state()) is None:
            raise Draining(f"{self._node_id} has no engine yet")
        return state

    def _ready(self) -> NodeState:
        state = self._state()
        if state is None or self._draining():
            raise Draining(f"{self._node_id} takes no new work")
        return state

    def _handovers(self) -> Handovers:
        if (handovers := self._ready().handovers) is None:
            raise Incompatible(f"the engine of {self._node_id} fetches no blocks: it has no --kv-transfer-config")
        return handovers

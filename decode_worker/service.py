"""The decode role: grants blocks to prefill nodes, takes over their requests, generates, streams tokens to routers.

It prefills locally what a router asks it to. Engine and receiver talk to each other directly (`grants`); everything
here belongs to the asyncio loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import Request, Response

from decode_worker.grants import Grants
from decode_worker.spans import Spans
from decode_worker.streams import RouterStreams, frames
from engine.events import Event, Failed, Generated
from node.accounts import audit
from node.frames import FrameResponse
from node.service import Base
from process.http import read_message
from protocol.messages import AttemptFailed, CancelRequest, GenerateRequest, StepFrame, TokenDelta


class DecodeService:
    """Joins the engine and the receiver of a decode node."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._streams = RouterStreams(self._router_lost)
        self._spans = Spans()
        self._grants = Grants(base, self._spans.begin)
        base.link.start(self._grants.receiver)
        base.app.post("/attempts/generate", status_code=202)(self.post_generate)
        base.app.post("/attempts/cancel", status_code=202)(self.post_cancel)
        base.app.get("/streams/{router_id}")(self.get_stream)

    async def post_generate(self, request: Request) -> None:
        """Prefill an attempt locally and generate; its output goes to the router's stream."""
        self._base.require_ready()
        job = (await read_message(request, GenerateRequest)).job
        self._spans.begin(job)
        self._base.engine.submit(lambda engine: engine.add(job))

    async def post_cancel(self, request: Request) -> None:
        """Drop all attempts of a request up to the given one."""
        cancel = await read_message(request, CancelRequest)
        self._base.engine.cancel(cancel.request_id, cancel.attempt)

    async def get_stream(self, router_id: str) -> Response:
        """The standing token stream of a router."""
        queue = self._streams.open(router_id)
        return FrameResponse(frames(queue), on_close=lambda: self._streams.close(router_id, queue))

    def busy(self) -> bool:
        return bool(self._base.engine.load.open_grants)

    def stop(self) -> None:
        self._streams.stop()
        self._base.link.stop()

    def to_link(self, events: Sequence[Event]) -> None:
        self._grants.take(events)

    def to_routers(self, events: Sequence[Event]) -> None:
        """What the engine made for one router goes out as one frame."""
        outputs: defaultdict[str, _Output] = defaultdict(_Output)
        for event in events:
            if isinstance(event, Generated | Failed):
                self._spans.take(event)
            if isinstance(event, Generated):
                if event.delta.reuse is not None:
                    audit(event.delta, self._base.metrics)
                outputs[event.router_id].deltas.append(event.delta)
                if event.delta.finish_reason is not None:
                    self._base.metrics.attempts["done"].inc()
            elif isinstance(event, Failed):
                outputs[event.router_id].failed.append(self._failure(event))
        for router_id, output in outputs.items():
            self._streams.publish(router_id, StepFrame(tuple(output.deltas), tuple(output.failed)))

    def _failure(self, event: Failed) -> AttemptFailed:
        self._base.metrics.attempts["cancelled" if event.error.code == "cancelled" else "failed"].inc()
        return AttemptFailed(*event.key, event.error.code, event.error.message)

    def _router_lost(self, router_id: str) -> None:
        self._base.engine.submit(lambda engine: engine.cancel_router(router_id))


@dataclass(slots=True)
class _Output:
    """Of one turn of the engine, for one router."""

    deltas: list[TokenDelta] = field(default_factory=list)
    failed: list[AttemptFailed] = field(default_factory=list)

"""The decode role: grants blocks to prefill nodes, takes over their requests, generates, streams tokens to routers.

It prefills locally what a router asks it to. The receiver calls from the link thread and goes straight to the engine's
inbox; everything else here belongs to the asyncio loop.
"""

from __future__ import annotations

from collections import defaultdict

from fastapi import Request, Response

from decode_worker.streams import TokenStreams, frames
from engine.events import Event, Failed, Generated, ReservationFailed, Reserved
from engine.request import Key
from kv_transfer.ports import TransferKey
from kv_transfer.receiver import Receiver
from node.frames import FrameResponse
from node.http import read_message
from node.node import Node
from node.pool_memory import PoolMemory
from protocol.errors import Cancelled, Draining, KvferryError
from protocol.messages import AttemptFailed, CancelRequest, Commit, GenerateRequest, Job, TokenDelta


class DecodeService:
    """Joins the engine and the receiver of a decode node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._streams = TokenStreams(self._router_lost)
        self._pending: dict[str, tuple[list[TokenDelta], list[AttemptFailed]]] = defaultdict(lambda: ([], []))
        self._link = node.make_link()
        self._receiver = Receiver(
            self._link,
            PoolMemory(node.parts.kv),
            _Grants(self, node),
            epoch=node.epoch,
            fingerprint=node.parts.fingerprint,
            verify=node.verify_checksums,
        )
        self._link.start(self._receiver)
        self.link_address = self._link.address
        node.app.post("/attempts/generate", status_code=202)(self.post_generate)
        node.app.post("/attempts/cancel", status_code=202)(self.post_cancel)
        node.app.get("/streams/{router_id}")(self.get_stream)

    async def post_generate(self, request: Request) -> None:
        """Prefill an attempt locally and generate; its output goes to the router's stream."""
        self._node.require_ready()
        job = (await read_message(request, GenerateRequest)).job
        self._node.engine.submit(lambda engine: engine.add(job))

    async def post_cancel(self, request: Request) -> None:
        """Drop all attempts of a request up to the given one."""
        cancel = await read_message(request, CancelRequest)
        self._node.engine.submit(lambda engine: engine.cancel(cancel.request_id, cancel.attempt))

    async def get_stream(self, router_id: str) -> Response:
        """The standing token stream of a router."""
        queue = self._streams.open(router_id)
        return FrameResponse(frames(queue), on_close=lambda: self._streams.close(router_id, queue))

    def busy(self) -> bool:
        return bool(self._node.engine.load.open_grants or self._pending)

    def stop(self) -> None:
        self._publish()
        self._streams.stop()
        self._link.stop()

    def on_event(self, event: Event) -> None:
        """News from the engine."""
        if isinstance(event, Generated):
            self._outputs(event.router_id)[0].append(event.delta)
            if event.delta.finish_reason is not None:
                self._node.metrics.attempts["done"].inc()
        elif isinstance(event, Failed):
            self._failed(event.key, event.router_id, event.error)
        elif isinstance(event, Reserved):
            self._node.metrics.grants["granted"].inc()
            self._receiver.granted(event.owner, event.first_block, event.block_ids)  # type: ignore[arg-type]
        elif isinstance(event, ReservationFailed):
            self._reservation_failed(event)

    def _outputs(self, router_id: str) -> tuple[list[TokenDelta], list[AttemptFailed]]:
        """Where this batch of events collects a router's output; sent as one frame once the batch is through."""
        if not self._pending:
            self._node.loop.call_soon(self._publish)
        return self._pending[router_id]

    def _publish(self) -> None:
        pending, self._pending = self._pending, defaultdict(lambda: ([], []))
        for router_id, (deltas, failed) in pending.items():
            self._streams.publish(router_id, deltas, failed)

    def _failed(self, key: Key, router_id: str, error: KvferryError) -> None:
        outcome = "cancelled" if error.code == "cancelled" else "failed"
        self._node.metrics.attempts[outcome].inc()
        self._outputs(router_id)[1].append(AttemptFailed(*key, error.code, error.message))

    def _reservation_failed(self, event: ReservationFailed) -> None:
        key: TransferKey = event.owner  # type: ignore[assignment]
        self._node.metrics.grants["aborted" if event.granted else "refused"].inc()
        if event.granted:
            self._receiver.cancel(key, event.error)
        else:
            self._receiver.refused(key, event.error)

    def _router_lost(self, router_id: str) -> None:
        self._node.engine.submit(lambda engine: engine.cancel_router(router_id))


class _Grants:
    """The receiver's questions, on the link thread, for the engine's inbox."""

    def __init__(self, service: DecodeService, node: Node) -> None:
        self._service = service
        self._node = node

    def reserve(self, key: TransferKey, job: Job) -> None:
        try:
            self._node.require_ready()
        except Draining as error:
            self._node.metrics.grants["refused"].inc()
            self._service._receiver.refused(key, error)
            return
        self._node.engine.submit(lambda engine: engine.reserve(key, job))

    def ready(self, key: TransferKey, commit: Commit) -> None:
        metrics, block_bytes = self._node.metrics, self._node.parts.layout.block_bytes
        metrics.ships["done"].inc()
        metrics.ship_bytes.inc(commit.block_count * block_bytes)
        self._node.engine.submit(lambda engine: engine.start(key, commit.first))

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        outcome = "aborted" if isinstance(error, Cancelled) else "failed"
        self._node.metrics.ships[outcome].inc()
        self._node.engine.submit(lambda engine: engine.withdraw(key, error))

    def quiet(self, key: TransferKey) -> None:
        self._node.engine.submit(lambda engine: engine.grant_quiet(key))

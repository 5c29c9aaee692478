"""HTTP endpoints of vLLM's API of token ids on a decode node: generate, abort, and the list of models.

The node's engine runs their requests like a router's, under a router id that only this process uses."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from dataclasses import asdict
from uuid import uuid4

from fastapi import Request, Response

from kvferry.decode_worker.scale_out.answers import Answer
from kvferry.decode_worker.scale_out.bodies import read_abort, read_generate
from kvferry.decode_worker.scale_out.jobs import GRAMMAR_FIELD, Jobs
from kvferry.decode_worker.scale_out.open_requests import OpenRequest, OpenRequests
from kvferry.model_files.model_name import split_names
from kvferry.model_files.source import resolve
from kvferry.protocol.errors import Draining, Unauthorized
from kvferry.protocol.messages import Job
from kvferry.runtime.disconnect import until_disconnect
from kvferry.runtime.http import read_body
from kvferry.structured_output.checker import Checker
from kvferry.worker.grammar_masks import read_vocabulary
from kvferry.worker.kv_events.config import read_kv_events_config
from kvferry.worker.message_stream import MessageStreamResponse
from kvferry.worker.service import NodeParts

GENERATE = "/inference/v1/generate"
MODELS, EVENT_SOURCES = "/v1/models", "/kv_event_sources"
ABORTS = ("/abort_requests", "/inference/v1/abort_requests")
BODY_BYTES, BYTES_PER_TOKEN = 2 * 2**20, 12
"""Maximum size of a body in bytes: a constant part, and a part for each token of the longest prompt."""


class ScaleOut:
    """Endpoints of the API, on the asyncio loop.

    With --scale-out-api-key they require this key, otherwise the cluster secret, like all endpoints of a node. accept:
    submits a job to the engine; raises Draining."""

    def __init__(self, base: NodeParts, accept: Callable[[Job], None]) -> None:
        settings, engine, info = base.settings, base.parts.engine, base.parts.info
        router_id = f"scale-out-{secrets.token_hex(8)}"
        (names,) = split_names(settings.served_model_name, 1)
        self._base, self._accept, self._key = base, accept, settings.scale_out_api_key
        self._body_bytes = BODY_BYTES + BYTES_PER_TOKEN * engine.longest
        self._open = OpenRequests(router_id, settings.max_num_seqs)
        self._jobs = Jobs(
            engine.config, engine.longest, info.vocab_size, (*names, info.name), base.adapters,
            eos_token_ids=base.parts.eos_token_ids, router_id=router_id, deadline_s=settings.scale_out_timeout,
        )  # fmt: skip
        self._checker = Checker(lambda: read_vocabulary(resolve(settings.model, weights=False), info.vocab_size))
        self._closing: asyncio.Future[None] | None = None
        base.streams.set_sink(router_id, self._open.publish)
        if self._key:
            base.keyed.update((GENERATE, MODELS, EVENT_SOURCES, *ABORTS))
        base.app.post(GENERATE)(self.post_generate)
        base.app.get(MODELS)(self.get_models)
        base.app.get(EVENT_SOURCES)(self.get_event_sources)
        for path in ABORTS:
            base.app.post(path)(self.post_abort)

    async def post_generate(self, request: Request) -> Response:
        """Generate from token ids; the answer is JSON or server-sent events."""
        self._authorize(request)
        self._base.require("decode")
        self._open.take_place()
        opened: OpenRequest | None = None
        streams = False
        try:
            body = read_generate(await read_body(request, self._body_bytes))
            job = self._jobs.make(body, self._open.new_name())
            if job.grammar is not None:
                await self._checker.check(job.grammar, GRAMMAR_FIELD)
            self._accept(job)
            opened = self._open.add(job.request_id, body.request_id or uuid4().hex)
            answer = Answer(body, opened, body.model or self._jobs.default_model)
            if not body.stream:
                data = await until_disconnect(request.receive, answer.whole())
                return Response(data, media_type="application/json")
            sent, streams = opened, True
            return MessageStreamResponse(answer.events(), lambda: self._close(sent), "text/event-stream")
        finally:
            if not streams:
                self._close(opened)

    async def get_models(self, request: Request) -> dict[str, object]:
        """List the model and the adapters under their names."""
        self._authorize(request)
        return {"object": "list", "data": self._jobs.cards()}

    async def get_event_sources(self, request: Request) -> dict[str, object]:
        """Return where KV events are published, under the only rank 0; empty if nowhere."""
        self._authorize(request)
        config = read_kv_events_config(self._base.settings.kv_events_config)
        return {} if config is None else {"0": asdict(config)}

    async def post_abort(self, request: Request) -> Response:
        """End requests by the ids that clients sent or that answers show; unknown ids are ignored."""
        self._authorize(request)
        for request_id in read_abort(await read_body(request, BODY_BYTES)).request_ids:
            for opened in self._open.named(request_id):
                self._cancel(opened)
                opened.end(aborted=True)
        return Response()

    def busy(self) -> bool:
        """Return whether an answer has not ended."""
        return self._open.taken > 0

    def stop(self) -> None:
        """End every answer: the node is shutting down."""
        for opened in self._open:
            opened.end(Draining("the node is stopping"))
        self._closing = asyncio.ensure_future(self._checker.close())

    def _authorize(self, request: Request) -> None:
        shown = request.headers.get("authorization", "").encode()
        if self._key and not hmac.compare_digest(shown, b"Bearer " + self._key.encode()):
            raise Unauthorized("the request does not carry the key of --scale-out-api-key as a bearer token")

    def _cancel(self, opened: OpenRequest) -> None:
        if not opened.ended:
            self._base.engine.cancel(opened.name, 0)

    def _close(self, opened: OpenRequest | None) -> None:
        """Stop counting a request; cancel it unless it has ended."""
        self._open.leave_place()
        if opened is not None:
            self._cancel(opened)
            self._open.remove(opened)

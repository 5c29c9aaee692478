"""GeneratingRoute: serves an endpoint that generates text, and resumes its recorded requests from their journals."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

from starlette.types import Message

from kvferry.protocol.errors import Cancelled, InvalidRequest, KvferryError
from kvferry.router.api.admission import AdmittedRequest
from kvferry.router.api.answer_base import Answer, Endpoint
from kvferry.router.api.beams import BeamGeneration
from kvferry.router.api.bodies.generating import GenerationBody
from kvferry.router.api.bodies.reader import parsed
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.generation import Generation
from kvferry.router.api.inference_route import InferenceRoute
from kvferry.router.api.keep_alive import KeepAlive
from kvferry.router.api.responder import Responder
from kvferry.router.api.served_models import ServedModel
from kvferry.router.journal.event_ids import HEADER, EventIds, parsed_id
from kvferry.router.journal.journaled_request import JournaledRequest
from kvferry.router.journal.request_journals import RequestJournals
from kvferry.router.request_context import RequestContext
from kvferry.runtime.tracing import TRACER

ALL = 2**31
"""A number above the tokens of any choice."""


async def _nowhere(message: Message) -> None:
    """Send nothing: there is no client."""


class GeneratingRoute(InferenceRoute[Endpoint]):
    """Route of a generating endpoint."""

    def __init__(self, endpoint: Endpoint, journals: RequestJournals, keep_alive: KeepAlive, *shared: Any) -> None:
        super().__init__(endpoint, *shared)
        self._journals, self._keep_alive = journals, keep_alive
        self._ending: set[asyncio.Task[None]] = set()

    async def _work(self, admitted: AdmittedRequest, data: bytes, responder: Responder) -> Answer:
        call = admitted.call
        if call.resume.name:
            with self._kept_alive(responder, streams=call.resume.streams):
                journal = await self._resumed_journal(call)
                body, size = await parsed(self.endpoint.body, journal.head.body), len(journal.head.body)
                return await self.answer(admitted, body, size, responder, journal)
        body, size, opened = await parsed(self.endpoint.body, data), len(data), None
        is_recorded = self._is_recorded(call, body)
        with self._kept_alive(responder, streams=is_recorded and bool(getattr(body, "stream", False))):
            if is_recorded:
                name, stored = self.endpoint.journal_name(call), getattr(body, "store", None) is not False
                watched = bool(getattr(body, "background", False))
                opened = await self._journals.begin(call, self._path, data, name, stored=stored, watched=watched)
            answering = self.answer(admitted, body, size, responder, opened)
            del data, body  # they may be long, and the stream too
            return await answering

    def _kept_alive(self, responder: Responder, *, streams: bool) -> AbstractContextManager[None]:
        """Keep a stream alive whose events have ids."""
        if streams and self._journals.window_s and not self.endpoint.numbers:
            return self._keep_alive.kept(responder)
        return nullcontext()

    def _is_recorded(self, call: RequestContext, body: RequestBody) -> bool:
        """Return whether the answer is recorded so that the client can resume it; beam search never is."""
        resume, streams = call.resume, bool(getattr(body, "stream", False))
        is_recorded = (
            resume.key
            or resume.after
            or (resume.reads_ids and streams)
            or (self.endpoint.always is not None and self.endpoint.always(body))
        )
        return bool(is_recorded) and not getattr(body, "use_beam_search", False)

    async def _resumed_journal(self, call: RequestContext) -> JournaledRequest:
        """Return the journal that a request names: by the id in its path, and the id of the client's last event."""
        resume = call.resume
        name, place = parsed_id(resume.after) if resume.after else (resume.name, None)
        if not name.startswith(resume.name):
            raise InvalidRequest(f"{HEADER}: the event belongs to another answer", param=HEADER)
        journal = await self._journals.find(call, name, self._path)
        journal.after, journal.after_event = place, resume.number
        return journal

    async def continue_request(self, tenant: str, name: str, computes: bool) -> None:
        """Continue a request of a router that died or gave it up, without a client.

        computes: if false, produce only what is recorded. Raises KvferryError."""
        realm = self._tenant_registry.realm(tenant)
        call = RequestContext(name, time.monotonic(), time.monotonic(), tenant, realm)
        journal = await self._journals.find(call, name, self._path, by_force=True)
        journal.outputs.computes = computes
        span = TRACER.start("request", "", endpoint=self._path, id=journal.call.id, tenant=tenant)
        admitted = AdmittedRequest(journal.call, self._tenant_registry, self._metrics, span)
        with admitted:
            body = await parsed(self.endpoint.body, journal.head.body)
            await self.answer(admitted, body, len(journal.head.body), Responder(_nowhere, self._path), journal)

    async def answer(
        self, admitted: AdmittedRequest, body: RequestBody, size: int, responder: Responder,
        journal: JournaledRequest | None = None,
    ) -> Answer:  # fmt: skip
        """Generate the answer to a body of `size` bytes, and send all of it except its last bytes."""
        if journal is None:
            generated = self._generated(admitted, body, size, responder, None)
            del body
            return await generated
        with journal:
            admitted.identify(journal.call)
            try:
                return await self._generated(admitted, body, size, responder, journal)
            except KvferryError as error:
                if journal.is_lost:
                    raise Cancelled("another router goes on with the request") from error
                raise

    async def _generated(
        self, admitted: AdmittedRequest, body: RequestBody, size: int, responder: Responder,
        journal: JournaledRequest | None,
    ) -> Answer:  # fmt: skip
        chat, size = await self._as_chat(admitted.call, body, size)
        del body
        pool = self._pools.pool(chat.model)
        parsing = chat.parsing(pool.text)
        resumes = journal is not None and journal.is_resumed
        call = admitted.prefer(chat, resumes=resumes, session=chat.prompt_cache_key)
        specs = await pool.specs(call, chat, size)
        admitted.adaptations = chat.adaptations
        if chat.use_beam_search:
            generation: Generation = BeamGeneration(pool, specs, chat)
        else:
            generation = Generation(pool, specs, chat.text_options(), parsing, n=chat.sequences())
        if self.endpoint.later is not None:
            background = await self.endpoint.later(admitted, pool, chat, generation, journal)
            if background is not None:
                return background
        ids = self._record(admitted, pool, generation, chat, journal) if journal is not None else None
        if journal is None or (journal.is_own and not journal.has_ended):
            generation.turn = await admitted.turn(pool.turns, generation.size)
        try:
            async with aclosing(generation.pieces()) as pieces:
                first = await anext(pieces)
                admitted.began(journal.used(generation.used) if journal is not None else generation.used)
                answer = self.endpoint.make_answer(admitted.call, pool, chat, generation)
                del chat, specs, parsing  # while it streams, its dispatches hold what a retry needs
                if journal is not None:
                    answer.streams, answer.ids = answer.streams or admitted.call.resume.streams, ids
                    answer.begin_after(journal.after_event)
                await answer.fold(first, pieces, responder)
                if journal is None or journal.is_own:
                    await answer.settle()
        finally:
            await generation.close()
        return answer

    def _record(
        self, admitted: AdmittedRequest, pool: ServedModel, generation: Generation, body: GenerationBody,
        journal: JournaledRequest,
    ) -> EventIds | None:  # fmt: skip
        """Record a generation, or begin it with the recorded outputs; return the ids of its stream's events, if any."""
        journal.outputs.check(generation.prompts)
        ids = None
        if (body.stream or admitted.call.resume.streams) and not self.endpoint.numbers:
            ids = EventIds(journal.name, len(generation.choices), journal.after)
        generation.record(journal.outputs, (lambda _: ALL) if self.endpoint.singly or ids is None else ids.singly)

        async def claimed() -> None:
            generation.turn = await admitted.turn(pool.turns, generation.size)

        def cancel() -> None:
            self._ending.add(ending := asyncio.create_task(generation.close()))
            ending.add_done_callback(self._ending.discard)

        journal.on_claim(claimed)
        journal.cancel = cancel
        return ids

    async def _as_chat(self, call: RequestContext, request: RequestBody, size: int) -> tuple[GenerationBody, int]:
        """Return the body as a generation request, and the size in bytes of everything it refers to."""
        if self.endpoint.translate is not None:
            chat = await self.endpoint.translate(call, request, self._pools)
            return chat, size + chat.earlier
        assert isinstance(request, GenerationBody)
        return request, size

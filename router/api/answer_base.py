"""Answer, base class that turns a generation's output into events or one body; Endpoint, the table row of a route."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from kvferry.protocol.errors import KvferryError
from kvferry.router.api.answers import ErrorAnswer
from kvferry.router.api.bodies.request_body import RequestBody
from kvferry.router.api.bodies.translated import TranslatedChat
from kvferry.router.api.generation import Generation
from kvferry.router.api.responder import Responder
from kvferry.router.api.sequence_stream import Choice, ChoicePiece, TextWriter
from kvferry.router.api.served_models import ServedModel, ServedModels
from kvferry.router.api.sse import event
from kvferry.router.api.write_buffer import WriteBuffer
from kvferry.router.journal.event_ids import EventIds
from kvferry.router.request_context import RequestContext
from kvferry.router.text.transcript import Piece


class Answer:
    """Answer of a generation: events as the pieces arrive, or one body after the last piece.

    Subclasses define the format. `fold` takes all pieces in their order, and `finish` sends the rest."""

    def __init__(self, generation: Generation, *, streams: bool) -> None:
        self.generation = generation
        self.streams = streams
        self.ids: EventIds | None = None
        """Writes ids into the stream's events; None: they have none."""
        self.held: WriteBuffer | None = None
        self._is_alone = False
        """Whether each output of the one choice is one piece."""

    async def fold(self, first: ChoicePiece, rest: AsyncIterator[ChoicePiece], responder: Responder) -> None:
        """Write the pieces as events, or collect them for one body.

        Writes nothing before `first`. Pieces that arrive together are written together (see `write_buffer`), and the
        last ones with the end."""
        if not self.streams:
            self.take(*first)
            self.generation.listen(self.take)
            async for choice, piece in rest:
                self.take(choice, piece)
            return
        await responder.begin_stream(self._route(), self.failing)
        held = self.held = WriteBuffer(responder)
        self._is_alone = self.ids is None and len(self.generation.choices) == 1 and not first[0].singly
        held.add(self._with_ids(*first, self.opening() + self.events(*first)))
        try:
            self.generation.listen(self._write, self._plain_writer())
            async for choice, piece in rest:
                if not held.add(self._with_ids(choice, piece, self.events(choice, piece))):
                    await held.flush()
                self.generation.listen(self._write, self._plain_writer())
        except Exception:
            await held.flush()
            raise
        except BaseException:
            held.drop()
            raise

    def _write(self, choice: Choice, piece: Piece) -> None:
        assert self.held
        add = self.held.add_last if self._is_alone else self.held.add
        if not add(self._with_ids(choice, piece, self.events(choice, piece))):
            self.generation.listen(None)

    def _plain_writer(self) -> TextWriter | None:
        """Return a writer of plain text, or None if the answer's events need pieces."""
        return self.write_text if self._is_alone and self.is_text else None

    is_text = False
    """Whether `write_text` may replace `events` for plain text."""

    def write_text(self, text: bytes) -> bool:
        """Write the event of the one choice's text; see TextWriter."""
        return False

    def _with_ids(self, choice: Choice, piece: Piece, events: bytes) -> bytes:
        if self.ids is None:
            return events
        return self.ids.mark(choice.index, len(piece.token_ids) + (piece.finish_reason is not None), events)

    async def settle(self) -> None:
        """Finish all work that must precede the end of the answer; never raise.

        The last events go out with the end, so call `flush` before waiting for anything here."""

    async def flush(self) -> None:
        """Write the events held back."""
        if self.held is not None:
            await self.held.flush()

    async def finish(self, responder: Responder) -> None:
        """Send the last events, or the whole body."""
        if self.streams:
            last = await self.held.last() if self.held is not None else b""
            closing = self.closing()
            await responder.write(last + (self.ids.close(closing) if self.ids else closing), more=False)
        else:
            await responder.whole(200, self.body(), self._route())

    def begin_after(self, number: int) -> None:
        """Leave out numbered events up to this one, which the client already has; -1: leave out none."""

    def opening(self) -> bytes:
        """Return the first events of a stream."""
        return b""

    def events(self, choice: Choice, piece: Piece) -> bytes:
        """Return the events of a piece; empty if it shows nothing."""
        raise NotImplementedError

    def closing(self) -> bytes:
        """Return the last events of a stream."""
        raise NotImplementedError

    def failing(self, error: KvferryError) -> bytes:
        """Return the last events of a stream that an error ends."""
        return event(error.body())

    def take(self, choice: Choice, piece: Piece) -> None:
        """Collect a piece of an answer that does not stream."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        """Return the whole answer, after the last piece."""
        raise NotImplementedError

    def _route(self) -> dict[str, str]:
        """Return the header with the route of the first choice."""
        route = self.generation.route
        return {} if route is None else {"x-kvferry-route": str(route)}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A generating endpoint: its path, body and answer.

    summary, answer, error  documentation: summary, and models of an answer and an error
    body                    request as received
    translate               translates the body into a chat, if it is not one itself; raises KvferryError
    make_answer             builds the answer after the first piece
    later                   runs the request in the background and returns an answer, or None; raises KvferryError
    prefix                  prefix of the answer's id
    singly                  each token of a recorded stream makes its own events, since events are counted to resume
    numbers                 events have sequence numbers instead of ids
    always                  whether requests with this body are recorded without a header that asks for it; None: no
    """

    path: str
    summary: str
    body: type[RequestBody]
    make_answer: Callable[[RequestContext, ServedModel, Any, Generation], Answer]
    answer: type[BaseModel]
    error: type[BaseModel] = ErrorAnswer
    translate: Callable[[RequestContext, Any, ServedModels], Awaitable[TranslatedChat]] | None = None
    later: Callable[..., Awaitable[Answer | None]] | None = None
    prefix: str = ""
    singly: bool = False
    numbers: bool = False
    always: Callable[[Any], bool] | None = None

    def journal_name(self, call: RequestContext) -> str:
        """Return the name of a request's journal; the nonce distinguishes requests with the same client request id."""
        return f"{self.prefix}{call.id}{'-' if self.numbers else '.'}{call.identity.nonce}"

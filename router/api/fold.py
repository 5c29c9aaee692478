"""Interface of an endpoint, and the accumulation of a generation's pieces into its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from kvferry.protocol.errors import KvferryError
from kvferry.router.api.admission import AdmittedRequest
from kvferry.router.api.answers import ErrorAnswer
from kvferry.router.api.bodies.generating import RequestBody
from kvferry.router.api.bodies.translated import TranslatedChat
from kvferry.router.api.generation import Generation
from kvferry.router.api.responder import Responder
from kvferry.router.api.sequence_stream import Choice, ChoicePiece
from kvferry.router.api.served_models import ServedModel, ServedModels
from kvferry.router.api.sse import event
from kvferry.router.api.write_buffer import WriteBuffer
from kvferry.router.request_context import RequestContext
from kvferry.router.text.transcript import Piece


class Answer:
    """Answer of a generation: events as the pieces arrive, or one body after the last.

    Kinds of answers say how either looks; `fold` takes all pieces, in the order in which they come, and `finish` sends
    what then remains."""

    def __init__(self, generation: Generation, *, streams: bool) -> None:
        self.generation = generation
        self._streams = streams
        self._held: WriteBuffer | None = None

    async def fold(self, first: ChoicePiece, rest: AsyncIterator[ChoicePiece], responder: Responder) -> None:
        """Write the pieces as events, or collect them.

        Nothing is written before `first` is there; what came together is written together (see `write_buffer`), and
        what comes last with the end."""
        if not self._streams:
            self.take(*first)
            self.generation.listen(self.take)
            async for choice, piece in rest:
                self.take(choice, piece)
            return
        await responder.begin_stream(self._route(), self.failing)
        held = self._held = WriteBuffer(responder)
        held.add(self.opening() + self.events(*first))
        try:
            self.generation.listen(self._tell)
            async for choice, piece in rest:
                if not held.add(self.events(choice, piece)):
                    await held.flush()
                self.generation.listen(self._tell)
        except Exception:
            await held.flush()
            raise
        except BaseException:
            held.drop()
            raise

    def _tell(self, choice: Choice, piece: Piece) -> None:
        assert self._held
        if not self._held.add(self.events(choice, piece)):
            self.generation.listen(None)

    async def settle(self) -> None:
        """Finish what must happen after the last piece, before the client learns of the end.

        Never raises. The last events go out with the end, so `flush` before anything is waited for here."""

    async def flush(self) -> None:
        """Write what is held back."""
        if self._held is not None:
            await self._held.flush()

    async def finish(self, responder: Responder) -> None:
        if self._streams:
            last = await self._held.last() if self._held is not None else b""
            await responder.write(last + self.closing(), more=False)
        else:
            await responder.whole(200, self.body(), self._route())

    def opening(self) -> bytes:
        """First events of a stream."""
        return b""

    def events(self, choice: Choice, piece: Piece) -> bytes:
        """Events for a piece; empty when it has nothing to tell."""
        raise NotImplementedError

    def closing(self) -> bytes:
        """Last events of a stream."""
        raise NotImplementedError

    def failing(self, error: KvferryError) -> bytes:
        """Last events of a stream that ends by an error."""
        return event(error.body())

    def take(self, choice: Choice, piece: Piece) -> None:
        """Collect a piece of an answer that does not stream."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        """The whole answer, after the last piece."""
        raise NotImplementedError

    def _route(self) -> dict[str, str]:
        """The header that tells where the first choice went."""
        route = self.generation.route
        return {} if route is None else {"x-kvferry-route": str(route)}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A generating endpoint: where it is, what it takes, and how it answers.

    summary, answer, error  for its description: the models of a whole answer and of an error
    body   the request as it comes
    asked  what it asks of a model, where the body does not say so by itself. Raises KvferryError
    shape  makes what shows the answer to what was asked, once there is something to show
    later  takes over what the client does not wait for; an answer that says so, or None. Raises KvferryError
    """

    path: str
    summary: str
    body: type[RequestBody]
    shape: Callable[[RequestContext, ServedModel, Any, Generation], Answer]
    answer: type[BaseModel]
    error: type[BaseModel] = ErrorAnswer
    asked: Callable[[RequestContext, Any, ServedModels], Awaitable[TranslatedChat]] | None = None
    later: Callable[[AdmittedRequest, ServedModel, Any, Generation], Awaitable[Answer | None]] | None = None

"""TokenSink: passes tokens from attempts straight to the client's stream, without waking a task for each."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.protocol.messages import TokenDelta
from kvferry.router.dispatch import jobs
from kvferry.router.dispatch.events import Event
from kvferry.router.dispatch.hedged_attempts import HedgedAttempts
from kvferry.router.dispatch.interface import Output
from kvferry.router.dispatch.timers import EventQueue, Timer
from kvferry.router.dispatch.token_order import OrderedTokens


class TokenSink:
    """Receives the events of one dispatch's attempts and passes plain tokens straight to the listener.

    A delta goes to the listener, converted by `output`, if the reader waits for it and it only continues the sequence.
    All other events go to the queue. So do exceptions of a listener, so that they end only its own request."""

    def __init__(
        self,
        queue: EventQueue[Event | Timer | Exception | None],
        sequence: OrderedTokens,
        hedged: HedgedAttempts,
        output: Callable[[TokenDelta], Output],
    ) -> None:
        self._listener: Callable[[Output], None] | None = None
        self._inbox, self._sequence, self._hedged, self._output = queue, sequence, hedged, output

    def listen(self, listener: Callable[[Output], None] | None) -> None:
        """Set or remove the listener; see Dispatch.listen."""
        self._listener = listener

    def end(self) -> None:
        """Stop passing tokens: the dispatch has ended."""
        self._listener, self._output = None, jobs.output

    def receive(self, event: Event) -> None:
        """Handle an event of an attempt: pass it to the listener or post it to the queue."""
        if self._listener is None or not (isinstance(event, TokenDelta) and self._continues(event)):
            self._inbox.post(event)
            return
        try:
            self._listener(self._output(event))
        except Exception as error:
            self._inbox.post(error)

    def _continues(self, delta: TokenDelta) -> bool:
        runners = self._hedged.runners
        return (
            self._inbox.awaited
            and delta.reuse is None
            and delta.attempt in runners
            and len(runners) == 1
            and self._sequence.take_next(delta)
        )

"""Direct path of tokens to the client's stream, without waking a task for each token."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.protocol.messages import TokenDelta
from kvferry.router.dispatch import jobs
from kvferry.router.dispatch.events import Event
from kvferry.router.dispatch.hedging import HedgedAttempts
from kvferry.router.dispatch.interface import Output
from kvferry.router.dispatch.timers import EventQueue, Timer
from kvferry.router.dispatch.token_order import OrderedTokens


class TokenSink:
    """Hears the attempts of one dispatch.

    What its reader waits for, and what does nothing but go on with the sequence, is told to who listens, as `output`
    makes it of the delta; all else goes to the mail, and so does what a listener raises: it must end no request but its
    own."""

    def __init__(
        self,
        mail: EventQueue[Event | Timer | Exception | None],
        sequence: OrderedTokens,
        hedged: HedgedAttempts,
        output: Callable[[TokenDelta], Output],
    ) -> None:
        self._listener: Callable[[Output], None] | None = None
        self._inbox, self._sequence, self._hedged, self._output = mail, sequence, hedged, output

    def listen(self, listener: Callable[[Output], None] | None) -> None:
        """See Dispatch.listen."""
        self._listener = listener

    def end(self) -> None:
        """The dispatch is over: nothing is heard any more."""
        self._listener, self._output = None, jobs.output

    def hear(self, event: Event) -> None:
        if self._listener is None or not (isinstance(event, TokenDelta) and self._goes_on(event)):
            self._inbox.post(event)
            return
        try:
            self._listener(self._output(event))
        except Exception as error:
            self._inbox.post(error)

    def _goes_on(self, delta: TokenDelta) -> bool:
        runners = self._hedged.runners
        return (
            self._inbox.awaited
            and delta.reuse is None
            and delta.attempt in runners
            and len(runners) == 1
            and self._sequence.goes_on(delta)
        )

"""Tokens that pass by a journey's mail: to wake a task for each would cost more than all else that is done for it."""

from __future__ import annotations

from collections.abc import Callable

from protocol.messages import TokenDelta
from router.journey.alarms import Alarm, Mail
from router.journey.events import Event
from router.journey.race import Race
from router.journey.sequence import Sequence
from router.journey.spec import Output


class Listening:
    """Hears the attempts of one journey. What its reader waits for, and what does nothing but go on with the sequence,
    is told to the `listener`, if there is one, as `output` makes it of the delta; all else goes to the mail. What the
    listener raises goes there, too: it must end no request but its own."""

    def __init__(
        self,
        mail: Mail[Event | Alarm | Exception | None],
        sequence: Sequence,
        race: Race,
        output: Callable[[TokenDelta], Output],
    ) -> None:
        self.listener: Callable[[Output], None] | None = None
        self._mail, self._sequence, self._race, self._output = mail, sequence, race, output

    def hear(self, event: Event) -> None:
        if self.listener is None or not (isinstance(event, TokenDelta) and self._goes_on(event)):
            self._mail.post(event)
            return
        try:
            for delta in self._sequence.push(event):
                self.listener(self._output(delta))
        except Exception as error:
            self._mail.post(error)

    def _goes_on(self, delta: TokenDelta) -> bool:
        runners = self._race.runners
        return (
            self._mail.awaited
            and self._sequence.due(delta)
            and delta.reuse is None
            and delta.attempt in runners
            and len(runners) == 1
        )

"""Retransmission of control messages of ships: senders repeat unanswered messages, receivers repeat their answers."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from math import inf

from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.tags import MAX_NONCE
from kvferry.protocol.errors import Cancelled
from kvferry.protocol.link_messages import CommitAck, Grant, Refusal

REPEAT_S = 2.0
"""Seconds until an unanswered message is first repeated; the interval doubles each time."""
REMEMBERED = 4096
"""Number of answers per sender that are kept for repeated messages."""
Answer = Grant | Refusal | CommitAck


class PendingMessage:
    """Last unanswered message of a ship; empty if all are answered. repeat_at: time of the next repetition."""

    def __init__(self) -> None:
        self.message = b""
        self.repeat_at = inf
        self._pause_s = REPEAT_S

    def sent(self, message: bytes, now: float) -> bytes:
        """Record a message that is being sent and needs an answer; return it."""
        self.message, self._pause_s, self.repeat_at = message, REPEAT_S, now + REPEAT_S
        return message

    def answered(self) -> None:
        """Stop repeating: the answer arrived or is not needed any more."""
        self.message, self.repeat_at = b"", inf

    def due(self, now: float) -> bool:
        """Return whether to repeat the message now; if so, schedule the next repetition."""
        if now < self.repeat_at:
            return False
        self._pause_s *= 2
        self.repeat_at = now + self._pause_s
        return True


class SendingProcess:
    """Receiver's state of one connected sender: the nonce of its tags, and the last answer to each transfer."""

    def __init__(self, nonce: int):
        self.nonce = nonce
        self._answers: dict[int, Answer | None] = {}

    def is_new(self, transfer: int) -> bool:
        """Return True once per transfer id, so that a repeated request does not reserve twice.

        Only the last REMEMBERED ids are remembered."""
        if transfer in self._answers:
            return False
        self._answers[transfer] = None
        if len(self._answers) > REMEMBERED:
            del self._answers[next(iter(self._answers))]
        return True

    def answer(self, message: Answer) -> None:
        """Store the latest answer for a transfer."""
        if message.transfer in self._answers:
            self._answers[message.transfer] = message

    def answered(self, transfer: int) -> Answer | None:
        """Return the latest answer for a transfer, or None."""
        return self._answers.get(transfer)


class Senders:
    """All connected senders. Runs on the link thread.

    send: sends a message on the link."""

    def __init__(self, send: Callable[[Peer, Answer], None]):
        self._send = send
        self._nonces = itertools.count(secrets.randbelow(MAX_NONCE))
        self._known: dict[Peer, SendingProcess] = {}

    def of(self, peer: Peer) -> SendingProcess:
        """Return the state of a sender; create it if the sender is new."""
        if peer not in self._known:
            self._known[peer] = SendingProcess(next(self._nonces) % MAX_NONCE + 1)
        return self._known[peer]

    def forget(self, peer: Peer) -> None:
        """Drop the state of a sender."""
        self._known.pop(peer, None)

    def answer(self, peer: Peer, message: Answer) -> None:
        """Send an answer, and keep it in case the sender repeats its message."""
        self.of(peer).answer(message)
        self._send(peer, message)

    def repeat(self, peer: Peer, transfer: int) -> None:
        """Answer a repeated or unknown message: send the last answer again, or refuse an unknown transfer."""
        sender = self.of(peer)
        answer = sender.answered(transfer)
        if answer is not None:
            self._send(peer, answer)
        elif sender.is_new(transfer):
            self.answer(peer, Refusal(transfer, Cancelled.code, "this transfer is unknown"))

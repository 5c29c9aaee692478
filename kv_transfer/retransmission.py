"""Questions of a sender and answers of a receiver: what is not answered is said again, and answered again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from math import inf

from kvferry.kv_transfer.link import Peer
from kvferry.kv_transfer.tags import MAX_NONCE
from kvferry.protocol.errors import Cancelled
from kvferry.protocol.link_messages import CommitAck, Grant, Refusal

REPEAT_S = 2.0
"""After which a question is repeated; then after twice as long each time."""
REMEMBERED = 4096
"""Answers that are kept for repeated questions."""
Answer = Grant | Refusal | CommitAck


class Question:
    """The last one of a ship, as it was sent; none: all is answered. repeat_at: when it is to be said again."""

    def __init__(self) -> None:
        self.message = b""
        self.repeat_at = inf
        self._pause_s = REPEAT_S

    def ask(self, message: bytes, now: float) -> bytes:
        """It is to be sent now."""
        self.message, self._pause_s, self.repeat_at = message, REPEAT_S, now + REPEAT_S
        return message

    def answered(self) -> None:
        """Or of no interest any more."""
        self.message, self.repeat_at = b"", inf

    def due(self, now: float) -> bool:
        """Return whether to repeat it now."""
        if now < self.repeat_at:
            return False
        self._pause_s *= 2
        self.repeat_at = now + self._pause_s
        return True


class SendingProcess:
    """The nonce of the tags of one connected sender, and the transfers it already asked for, with what it was told."""

    def __init__(self, nonce: int):
        self.nonce = nonce
        self._answers: dict[int, Answer | None] = {}

    def is_new(self, transfer: int) -> bool:
        """True once per transfer id (the last REMEMBERED are remembered): a repeated request must not reserve twice."""
        if transfer in self._answers:
            return False
        self._answers[transfer] = None
        if len(self._answers) > REMEMBERED:
            del self._answers[next(iter(self._answers))]
        return True

    def answer(self, message: Answer) -> None:
        """The last word on a transfer so far."""
        if message.transfer in self._answers:
            self._answers[message.transfer] = message

    def answered(self, transfer: int) -> Answer | None:
        """The last word on it, if there was one."""
        return self._answers.get(transfer)


class Senders:
    """All that are connected. send: puts a message on the link. Runs on the link thread."""

    def __init__(self, send: Callable[[Peer, Answer], None]):
        self._send = send
        self._nonces = itertools.count(random.randrange(MAX_NONCE))
        self._known: dict[Peer, SendingProcess] = {}

    def of(self, peer: Peer) -> SendingProcess:
        if peer not in self._known:
            self._known[peer] = SendingProcess(next(self._nonces) % MAX_NONCE + 1)
        return self._known[peer]

    def forget(self, peer: Peer) -> None:
        self._known.pop(peer, None)

    def answer(self, peer: Peer, message: Answer) -> None:
        """Say it, and again when what it answers is repeated."""
        self.of(peer).answer(message)
        self._send(peer, message)

    def repeat(self, peer: Peer, transfer: int) -> None:
        """Something was said again, or of a transfer that never came: the sender did not hear the answer."""
        sender = self.of(peer)
        answer = sender.answered(transfer)
        if answer is not None:
            self._send(peer, answer)
        elif sender.is_new(transfer):
            self.answer(peer, Refusal(transfer, Cancelled.code, "nothing is known of this transfer"))

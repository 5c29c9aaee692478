"""Dispatch of incoming grants to their handlers by kind."""

from __future__ import annotations

from kvferry.kv_transfer.ports import GrantEvents, TransferKey
from kvferry.kv_transfer.receiver import Receiver
from kvferry.protocol.errors import InvalidRequest, KvferryError
from kvferry.protocol.link_messages import Asked, Commit
from kvferry.worker.service import Base


class GrantDispatch:
    """Implements kv_transfer.ports.GrantEvents, by those of them that were named before the dock starts.

    On the link thread; `refuse` may be called from any."""

    def __init__(self, base: Base) -> None:
        self._dock = base.dock
        self._kinds: dict[type, GrantEvents] = {}
        self._open: dict[TransferKey, GrantEvents] = {}
        self.receiver = Receiver(base.dock, self, base.epoch, base.parts.fingerprint)

    def take(self, kind: type, events: GrantEvents) -> None:
        """Register the handler of one kind of grant request."""
        self._kinds[kind] = events

    def refuse(self, key: TransferKey, error: KvferryError) -> None:
        """In answer to `reserve`. The receiver says no more of it, or that it is quiet at once."""
        self.receiver.refused(key, error)
        self._dock.submit(lambda: self._forget(key))

    def reserve(self, key: TransferKey, asked: Asked) -> None:
        events = self._kinds.get(type(asked))
        if events is None:
            self.receiver.refused(key, InvalidRequest("this node takes no stream"))
        else:
            self._open[key] = events
            events.reserve(key, asked)

    def ready(self, key: TransferKey, commit: Commit) -> None:
        self._open.pop(key).ready(key, commit)

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        self._open[key].failed(key, error)

    def quiet(self, key: TransferKey) -> None:
        self._open.pop(key).quiet(key)

    def _forget(self, key: TransferKey) -> None:
        self._open.pop(key, None)

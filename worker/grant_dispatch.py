"""Dispatch of incoming grant requests to handlers by their kind: job, copy of blocks, supply of a fetch."""

from __future__ import annotations

from kvferry.kv_transfer.ports import GrantEvents, TransferKey
from kvferry.kv_transfer.receiver import Receiver
from kvferry.protocol.errors import InvalidRequest, KvferryError
from kvferry.protocol.link_messages import Commit, GrantPurpose
from kvferry.worker.service import NodeParts


class GrantDispatch:
    """Routes grant requests and their later events to the handler of their kind.

    Implements `kv_transfer.ports.GrantEvents` on the link thread. Handlers are registered before the dock starts.
    `refuse` may be called from any thread."""

    def __init__(self, base: NodeParts) -> None:
        self._dock = base.dock
        self._kinds: dict[type, GrantEvents] = {}
        self._open: dict[TransferKey, GrantEvents] = {}
        self.receiver = Receiver(base.dock, self, base.epoch, base.parts.fingerprint)

    def take(self, kind: type, events: GrantEvents) -> None:
        """Register the handler of one kind of grant request."""
        self._kinds[kind] = events

    def refuse(self, key: TransferKey, error: KvferryError) -> None:
        """Refuse the grant request of a `reserve` call.

        The receiver then reports nothing more about it, except `quiet` if the ship has already failed."""
        self.receiver.refused(key, error)
        self._dock.submit(lambda: self._forget(key))

    def reserve(self, key: TransferKey, purpose: GrantPurpose) -> None:
        events = self._kinds.get(type(purpose))
        if events is None:
            self.receiver.refused(key, InvalidRequest("this node accepts no streams"))
        else:
            self._open[key] = events
            events.reserve(key, purpose)

    def ready(self, key: TransferKey, commit: Commit) -> None:
        self._open.pop(key).ready(key, commit)

    def failed(self, key: TransferKey, error: KvferryError) -> None:
        self._open[key].failed(key, error)

    def quiet(self, key: TransferKey) -> None:
        self._open.pop(key).quiet(key)

    def _forget(self, key: TransferKey) -> None:
        self._open.pop(key, None)

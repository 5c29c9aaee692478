"""UCX worker and endpoint of one connection: progress, idling and forced close.

UCX's shared-memory queue belongs to the worker that reads it. A peer that dies or freezes while it writes blocks the
queue for all writers. So each peer has a worker of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kvferry.kv_transfer.tags import NEVER_SENT_TAG
from kvferry.kv_transfer.ucx_library import UcxLibrary
from kvferry.protocol.errors import TransferFailed

log = logging.getLogger(__name__)
SPIN_S = 60e-6
PROGRESS_BURST = 32
"""Maximum number of calls of progress in a row."""
RELEASE_S, RELEASE_ROUNDS = 0.05, 1000
"""Minimum time in seconds, and number of rounds, that UCX gets to end the operations of a closed endpoint.

It needs a millisecond, unless the other side is frozen and its queue full. Rounds are counted, too, because this thread
may not get a core during that time."""


class UcxWorker:
    """UCX worker and endpoint of one connection. Only the link thread touches it.

    An active worker is progressed in every round. An idle one is armed: its descriptor becomes readable when UCX has
    something to do. poll(progressed): called in every round; returns whether it found work. broken(error): called when
    a round raises."""

    def __init__(
        self, library: UcxLibrary, context: Any, poll: Callable[[bool], bool], broken: Callable[[Exception], None]
    ):
        self._library, self._poll, self._broken = library, poll, broken
        self._endpoint: Any = None
        self._closing = False
        self._closed: Callable[[], None]
        try:
            self._worker = library.api.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
            self._worker.init_blocking_progress_mode()
        except library.api.UCXError as error:
            raise TransferFailed(f"no room for another connection: {error}") from error
        self.descriptor = int(self._worker.epoll_file_descriptor)
        self.address: bytes = self._worker.address.tobytes()
        self._last_work_at = time.monotonic()

    def attach(self, address: bytes, closed: Callable[[], None]) -> Any:
        """Create the endpoint to the other side's worker; UCX calls `closed` if it closes it. Raises TransferFailed."""
        api = self._library.api
        try:
            target = api.UCXAddress.create_from_buffer(address)
            self._endpoint = self._worker.create_endpoint_from_worker_address(target, True)
        except api.UCXError as error:
            raise TransferFailed(f"UCX does not reach the other side: {error}") from error
        self._closed = closed
        self._endpoint.set_close_callback(self._on_close)
        return self._endpoint

    def touch(self) -> None:
        """Keep the worker active for a while: something was posted."""
        self._last_work_at = time.monotonic()

    def round(self) -> bool:
        """Progress UCX and run `poll`; return whether there was work."""
        try:
            progressed = self._progress()
            worked = self._poll(progressed) or progressed
        except Exception as error:
            log.exception("a connection of the link failed")
            self._broken(error)
            return True
        if worked:
            self._last_work_at = time.monotonic()
        return worked

    def arm_if_idle(self) -> bool:
        """Return True, with the worker armed, if it had no work for SPIN_S."""
        return time.monotonic() - self._last_work_at > SPIN_S and bool(self._worker.arm())

    def close(self, ended: Callable[[], bool]) -> bool:
        """Force the endpoint closed, which takes some milliseconds; return whether UCX released all its operations.

        UCX is not called for this worker again, so memory that only this process writes is quiet. If the result is
        False, UCX never frees the worker, its descriptors and its shared memory. ended: returns whether every operation
        posted on the endpoint has ended."""
        if self._endpoint is not None:
            self._closing = True
            self._endpoint.close_blocking()
            self._endpoint = None
            self._worker.cancel_inflight_requests()
            until = time.monotonic() + RELEASE_S
            rounds = 0
            while not ended() and (rounds < RELEASE_ROUNDS or time.monotonic() < until):
                self._worker.progress_once()
                rounds += 1
        emptied = self._drain_receives()
        self._worker.cancel_inflight_requests()
        self._worker = None
        return ended() and emptied

    def _on_close(self) -> None:
        """Handle the close of the endpoint, by UCX itself or by `close`.

        ucxx keeps the operations in flight of a closed endpoint, and so the worker, until another operation is
        registered on it. So during `close` this method registers one, which is cancelled with the others."""
        if self._closing:
            self._endpoint.tag_recv(self._library.array(bytearray(1)), self._library.api.UCXXTag(NEVER_SENT_TAG))
        else:
            self._closed()

    def _drain_receives(self) -> bool:
        """Receive the data of cancelled receives into one byte each; return whether all of it ended.

        When ucxx frees the worker it would otherwise wait for that data without limit, even if the sender is gone."""
        api = self._library.api
        byte = self._library.array(bytearray(1))
        taken = []
        while (found := self._worker.tag_probe(api.UCXXTag(0), api.UCXXTagMask(0), True)).matched:
            taken.append(self._worker.tag_recv_with_handle(byte, found))
        return all(request.completed for request in taken)

    def _progress(self) -> bool:
        for count in range(PROGRESS_BURST):
            if not self._worker.progress_once():
                return count > 0
        return True

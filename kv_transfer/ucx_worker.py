"""UCX worker of one connection.

UCX's shared-memory queue belongs to the worker that reads it, and a peer that dies or freezes while it writes stops the
queue for all writers. So no two peers share a worker."""

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
"""Calls of progress in a row."""
LETTING_GO_S, LETTING_GO_ROUNDS = 0.05, 1000
"""What UCX has at least to end the operations of an endpoint that was closed; it needs a millisecond, unless the other
side is frozen and its queue full. Rounds count, too, for this thread may be the one that stands still."""


class UcxWorker:
    """Only the link thread touches it.

    Awake, it is progressed in every round; at rest it is armed, and its descriptor becomes readable when UCX has
    something to do. look(progressed) is called in every round: whether it found work. broken(error): a round raised."""

    def __init__(
        self, library: UcxLibrary, context: Any, look: Callable[[bool], bool], broken: Callable[[Exception], None]
    ):
        self._library, self._look, self._broken = library, look, broken
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
        self._worked_at = time.monotonic()

    def attach(self, address: bytes, closed: Callable[[], None]) -> Any:
        """The endpoint to the other side's worker; `closed` is called when UCX gives it up. Raises TransferFailed."""
        api = self._library.api
        try:
            target = api.UCXAddress.create_from_buffer(address)
            self._endpoint = self._worker.create_endpoint_from_worker_address(target, True)
        except api.UCXError as error:
            raise TransferFailed(f"UCX does not reach the other side: {error}") from error
        self._closed = closed
        self._endpoint.set_close_callback(self._gave_up)
        return self._endpoint

    def touch(self) -> None:
        """Something was posted: it is progressed for a while."""
        self._worked_at = time.monotonic()

    def round(self) -> bool:
        """Let UCX work, and its user look; whether there was anything to do."""
        try:
            progressed = self._progress()
            worked = self._look(progressed) or progressed
        except Exception as error:
            log.exception("a connection of the link failed")
            self._broken(error)
            return True
        if worked:
            self._worked_at = time.monotonic()
        return worked

    def rests(self) -> bool:
        """Return whether it was without work for long enough, and is armed now."""
        return time.monotonic() - self._worked_at > SPIN_S and bool(self._worker.arm())

    def close(self, ended: Callable[[], bool]) -> bool:
        """Force the endpoint closed, which takes some milliseconds; `ended` tells whether every operation posted on it
        ended. UCX is not called for it again, so what this process alone writes is written no more. False: UCX did not
        let go of all operations in time, and never frees the worker with its descriptors and its shared memory."""
        if self._endpoint is not None:
            self._closing = True
            self._endpoint.close_blocking()
            self._endpoint = None
            self._worker.cancel_inflight_requests()
            until = time.monotonic() + LETTING_GO_S
            rounds = 0
            while not ended() and (rounds < LETTING_GO_ROUNDS or time.monotonic() < until):
                self._worker.progress_once()
                rounds += 1
        emptied = self._empty()
        self._worker.cancel_inflight_requests()
        self._worker = None
        return ended() and emptied

    def _gave_up(self) -> None:
        """UCX closed the endpoint, by itself or because `close` asked for it.

        Then ucxx keeps the operations that were under way, and through them the worker, until another one is registered
        on the closed endpoint: this one is, and is cancelled with them."""
        if self._closing:
            self._endpoint.tag_recv(self._library.array(bytearray(1)), self._library.api.UCXXTag(NEVER_SENT_TAG))
        else:
            self._closed()

    def _empty(self) -> bool:
        """Take in what came for receives that were cancelled, at no more than a byte each: ucxx would wait for all of
        it without any limit when it frees the worker, though its sender may be gone. Whether all of it ended."""
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

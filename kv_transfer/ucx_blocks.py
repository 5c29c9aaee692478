"""The blocks in flight on one endpoint of a UCX link."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from kv_transfer.link import Done
from kv_transfer.ucx_library import UcxLibrary
from protocol.errors import TransferFailed

SCAN = 64


class Operation(NamedTuple):
    """A posted block. A request of UCX keeps no reference to its buffer, so this does."""

    request: Any
    buffer: Any
    done: Done


class Post(NamedTuple):
    """A block to be sent (or received into) under a tag."""

    send: bool
    tag: int
    buffer: Any
    done: Done


class UcxBlocks:
    """Posts blocks on `endpoint` and finds those that ended; only the link thread touches it."""

    def __init__(self, name: str, library: UcxLibrary):
        self._name, self._library = name, library
        self.endpoint: Any = None
        self._operations: deque[Operation] = deque()
        self._kept: list[Operation] = []
        self._unscanned = 0

    def post(self, post: Post) -> None:
        """Raises ValueError for a buffer that UCX would silently treat wrongly, TransferFailed."""
        array = self._library.array(post.buffer)
        if not array.c_contiguous or not (post.send or not array.readonly):
            raise ValueError(f"a block's buffer must be contiguous{'' if post.send else ' and writable'}")
        call = self.endpoint.tag_send if post.send else self.endpoint.tag_recv
        try:
            request = call(array, self._library.api.UCXXTag(post.tag))
        except self._library.api.UCXError as error:
            raise TransferFailed(f"{self._name}: UCX refused a block: {error}") from error
        self._operations.append(Operation(request, (post.buffer, array), post.done))
        self._unscanned += 1

    @property
    def scanned(self) -> bool:
        """Whether every block was looked at since UCX last made progress."""
        return not self._unscanned

    def wake(self) -> None:
        """UCX made progress: any block may be complete now."""
        self._unscanned = len(self._operations)

    def reap(self) -> list[tuple[Done, Exception | None]]:
        """Look at up to SCAN blocks not looked at yet; those that ended, with their errors."""
        ended: list[tuple[Done, Exception | None]] = []
        count = min(SCAN, self._unscanned)
        self._unscanned -= count
        for _ in range(count):
            operation = self._operations.popleft()
            if operation.request.completed:
                ended.append((operation.done, self._error_of(operation.request)))
            else:
                self._operations.append(operation)
        return ended

    def _error_of(self, request: Any) -> Exception | None:
        try:
            request.check_error()
        except self._library.api.UCXError as error:
            return TransferFailed(f"{self._name}: block not transferred: {error}")
        return None

    def abandon(self) -> list[Done]:
        """Callbacks of every block not ended. Buffers stay referenced until `release`: UCX may still touch them."""
        dones = [operation.done for operation in self._operations]
        self._kept.extend(self._operations)
        self._operations.clear()
        self._unscanned = 0
        return dones

    def release(self) -> None:
        """The endpoint is closed: UCX touches no buffer any more."""
        self.endpoint = None
        self._kept.clear()

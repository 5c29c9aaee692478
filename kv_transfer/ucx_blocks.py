"""Block operations in flight on one UCX endpoint."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from kvferry.kv_transfer.link import Done
from kvferry.kv_transfer.tags import transfer_of
from kvferry.kv_transfer.ucx_library import UcxLibrary
from kvferry.protocol.errors import TransferFailed

SCAN = 64
"""Blocks that are looked at in a round."""
TURN = 16
"""Of them, in one turn of a transfer."""


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
    """Posts blocks on `endpoint` and finds those that ended; only the link thread touches it.

    The blocks of a transfer end in their order, or nearly so: of each transfer only the one that was posted first is
    looked at, however many thousand receives a long prompt has."""

    def __init__(self, name: str, library: UcxLibrary):
        self._name, self._library = name, library
        self.endpoint: Any = None
        self._lanes: dict[int, deque[Operation]] = {}
        """The operations not ended, by transfer and direction; no lane is empty."""
        self._unscanned: dict[int, None] = {}
        self._kept: list[Operation] = []

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
        lane = transfer_of(post.tag) << 1 | post.send
        self._lanes.setdefault(lane, deque()).append(Operation(request, (post.buffer, array), post.done))
        self._unscanned[lane] = None

    @property
    def scanned(self) -> bool:
        """Return whether every transfer was looked at since UCX last made progress."""
        return not self._unscanned

    def wake(self) -> None:
        """UCX made progress: any block may be complete now."""
        self._unscanned = dict.fromkeys(self._lanes)

    def reap(self) -> list[tuple[Done, Exception | None]]:
        """Look at up to SCAN blocks, of transfers not looked at yet by turns; those that ended, with their errors."""
        ended: list[tuple[Done, Exception | None]] = []
        left = SCAN
        while self._unscanned and left > 0:
            lane = next(iter(self._unscanned))
            del self._unscanned[lane]
            left -= self._reap(lane, min(left, TURN), ended)
        return ended

    def _reap(self, lane: int, most: int, ended: list[tuple[Done, Exception | None]]) -> int:
        """How many blocks of a lane were looked at. One that has more to look at has its turn again."""
        operations = self._lanes[lane]
        for looked in range(1, most + 1):
            if not operations[0].request.completed:
                return looked
            operation = operations.popleft()
            ended.append((operation.done, self._error_of(operation.request)))
            if not operations:
                del self._lanes[lane]
                return looked
        self._unscanned[lane] = None
        return most

    def _error_of(self, request: Any) -> Exception | None:
        try:
            request.check_error()
        except self._library.api.UCXError as error:
            return TransferFailed(f"{self._name}: block not transferred: {error}")
        return None

    def abandon(self) -> list[Done]:
        """Callbacks of every block not ended. Buffers stay referenced until `release`: UCX may still touch them."""
        abandoned = [operation for operations in self._lanes.values() for operation in operations]
        self._kept.extend(abandoned)
        self._lanes.clear()
        self._unscanned.clear()
        return [operation.done for operation in abandoned]

    def ended(self) -> bool:
        """Return whether UCX has done with every block that was abandoned."""
        self._kept = [operation for operation in self._kept if not operation.request.completed]
        return not self._kept

    def release(self) -> None:
        """The endpoint is closed: UCX touches no buffer any more."""
        self.endpoint = None
        self._kept.clear()

"""Blocks being sent or received on one UCX endpoint: posts them, and finds those that have completed."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from kvferry.kv_transfer.link import Done
from kvferry.kv_transfer.tags import transfer_of
from kvferry.kv_transfer.ucx_library import UcxLibrary
from kvferry.protocol.errors import TransferFailed

SCAN = 64
"""Maximum number of blocks checked for completion per round."""
TURN = 16
"""Maximum number of blocks of one lane checked before the next lane's."""


class Operation(NamedTuple):
    """A posted block. It references the buffer, because a UCX request does not."""

    request: Any
    buffer: Any
    done: Done


class Post(NamedTuple):
    """A block to send, or to receive into, under a tag."""

    send: bool
    tag: int
    buffer: Any
    done: Done


class UcxBlocks:
    """Posts blocks on `endpoint` and finds completed ones. Only the link thread touches it.

    A lane holds the blocks of one transfer in one direction. They complete in order, or nearly so. So only the first
    block of each lane is checked, even if a long prompt has thousands of receives."""

    def __init__(self, name: str, library: UcxLibrary):
        self._name, self._library = name, library
        self.endpoint: Any = None
        self._lanes: dict[int, deque[Operation]] = {}
        """Operations in flight, by lane; no lane is empty."""
        self._unscanned: dict[int, None] = {}
        self._kept: list[Operation] = []

    def post(self, post: Post) -> None:
        """Post a block. Raises TransferFailed, and ValueError for a buffer that UCX would silently mishandle."""
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
        """Return whether every lane was checked since UCX last made progress."""
        return not self._unscanned

    def wake(self) -> None:
        """Check all lanes again: UCX made progress, so any block may be complete."""
        self._unscanned = dict.fromkeys(self._lanes)

    def reap(self) -> list[tuple[Done, Exception | None]]:
        """Check up to SCAN blocks, at most TURN of a lane at a time; return callback and error of completed ones."""
        ended: list[tuple[Done, Exception | None]] = []
        left = SCAN
        while self._unscanned and left > 0:
            lane = next(iter(self._unscanned))
            del self._unscanned[lane]
            left -= self._reap(lane, min(left, TURN), ended)
        return ended

    def _reap(self, lane: int, most: int, ended: list[tuple[Done, Exception | None]]) -> int:
        """Check up to `most` blocks of a lane; return how many. A lane with more blocks to check gets another turn."""
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
        """Return the callbacks of all blocks in flight. Buffers stay referenced until `release`."""
        abandoned = [operation for operations in self._lanes.values() for operation in operations]
        self._kept.extend(abandoned)
        self._lanes.clear()
        self._unscanned.clear()
        return [operation.done for operation in abandoned]

    def ended(self) -> bool:
        """Return whether UCX has completed every abandoned block."""
        self._kept = [operation for operation in self._kept if not operation.request.completed]
        return not self._kept

    def release(self) -> None:
        """Drop all buffers: the endpoint is closed and UCX touches them no more."""
        self.endpoint = None
        self._kept.clear()

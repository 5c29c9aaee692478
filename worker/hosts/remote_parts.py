"""Transfer of block parts between rank 0's host memory and the KV pool of a rank on another host, over its channel."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch

from kvferry.protocol.errors import reason
from kvferry.runtime.rank_channel import RankChannel, RankZeroChannels
from kvferry.worker.block_parts import Move, RankPart, Segments


class RemotePart:
    """Rank 0's view of the part of one rank on another host.

    lines, other: the channels to the ranks, and the number of this rank's channel. The methods raise OSError or
    EOFError if the rank has ended."""

    def __init__(self, part: RankPart, lines: RankZeroChannels, other: int) -> None:
        self._part, self._lines, self._other = part, lines, other

    def send(self, rows: Sequence[torch.Tensor]) -> None:
        """Send the rank its parts of the rows, after the call to copy them into its pool."""
        views = [self._part.within(row) for row in rows]
        for run in self._part.runs(len(views)):
            self._lines.send(self._other, torch.stack(views[run]).view(-1).numpy().data)

    def receive(self, rows: Sequence[torch.Tensor]) -> None:
        """Receive the rank's parts into the rows, after it has answered the call to send them."""
        if not self._part.brings:
            return
        views = [self._part.within(row) for row in rows]
        for run in self._part.runs(len(views)):
            found = parts(self._lines.receive(self._other), self._part)
            for view, part in zip(views[run], found, strict=True):
                view.copy_(part)


def follow(line: RankChannel, own: Segments) -> None:
    """Execute the calls of rank 0's DeviceRankPool on another host, in a loop.

    The error of a failed call is sent as its answer, and raised, since the parts that follow the call would be taken
    for calls. Raises OSError or EOFError when rank 0 has ended."""
    while True:
        call: int | Move = pickle.loads(line.receive())  # noqa: S301 - from rank 0, under the key of this connection
        try:
            if isinstance(call, Move):
                own.check(call)
                if not call.out:
                    _bring(line, own, call.blocks)
        except Exception as error:
            line.send(reason(error).encode())
            raise
        line.send(b"")
        if isinstance(call, Move) and call.out and own.part.brings:
            for run in own.part.runs(len(call.blocks)):
                line.send(own.take(call.blocks[run]).view(-1).numpy().data)


def parts(message: bytes | bytearray, part: RankPart) -> torch.Tensor:
    """Return parts of blocks from a message, uint8 [count, planes, plane_bytes]."""
    data = message if isinstance(message, bytearray) else bytearray(message)  # torch wants memory that may be written
    return torch.frombuffer(data, dtype=torch.uint8).view(-1, part.planes, part.plane_bytes)


def _bring(line: RankChannel, own: Segments, blocks: Sequence[int]) -> None:
    for run in own.part.runs(len(blocks)):
        own.bring(parts(line.receive(), own.part), blocks[run])

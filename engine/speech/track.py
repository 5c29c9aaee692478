"""Track: samples of an audio file, decoded on threads as they are asked for; only one window of them is kept."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Executor

import torch

from kvferry.engine.speech.audio import AudioFile
from kvferry.engine.speech.log_mel import RATE


class Track:
    """Audio of one file, read forwards. It belongs to one asyncio loop. threads: where the file is decoded."""

    def __init__(self, data: bytes, max_seconds: float, threads: Executor) -> None:
        self._data, self._max_seconds, self._threads = data, max_seconds, threads
        self._file: AudioFile | None = None
        self._kept, self._first = torch.empty(0), 0
        self._reading = threading.Lock()

    @property
    def duration(self) -> float:
        """Return the seconds that were read so far; of the whole file once `read` returned nothing."""
        return (self._first + len(self._kept)) / RATE

    async def read(self, first: int, count: int) -> torch.Tensor:
        """Return samples from `first` on, fewer at the end. Earlier ones are dropped. Raises InvalidRequest."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, first, count)

    async def close(self) -> None:
        """Free the decoder, once a read that may still run has ended."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._close)

    def _read(self, first: int, count: int) -> torch.Tensor:
        with self._reading:
            if self._file is None:
                self._file = AudioFile(self._data, self._max_seconds)
            assert self._first <= first <= self._first + len(self._kept)
            self._kept, self._first = self._kept[first - self._first :], first
            if (missing := count - len(self._kept)) > 0:
                self._kept = torch.cat((self._kept, self._file.read(missing)))
            return self._kept[:count]

    def _close(self) -> None:
        with self._reading:
            if self._file is not None:
                self._file.close()

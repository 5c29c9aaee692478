"""SpeechLoop: engine thread of speech, which encodes windows layer by layer and decodes all of them in between."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from kvferry.engine.free_list import FreeList
from kvferry.engine.speech.batch import SpeechBatch
from kvferry.engine.speech.decoder import Decoder
from kvferry.engine.speech.encoder import Encoder
from kvferry.engine.speech.window import Attempt, Reading, Window
from kvferry.protocol.errors import KvferryError, StepFailed, reason

log = logging.getLogger(__name__)

Command = Window | Attempt | Reading


class SpeechLoop:
    """Thread that computes. `encode`, `decode`, `read` and `release` may be called from any thread.

    text_blocks, audio_blocks: blocks of a window for its tokens and for the encoder's output. Windows wait for blocks
    in order of arrival; each holds them until it is released, so none waits for another's release while it has some.
    fault: why the thread ended."""

    def __init__(
        self,
        encoder: Encoder,
        decoder: Decoder,
        batch: SpeechBatch,
        *,
        blocks: int,
        text_blocks: int,
        audio_blocks: int,
    ) -> None:
        assert text_blocks + audio_blocks <= blocks, "no room for one window"
        self.encoder, self.decoder, self.batch = encoder, decoder, batch
        self._free, self._text_blocks, self._audio_blocks = FreeList(blocks), text_blocks, audio_blocks
        self._commands: deque[Command] = deque()
        self._wakes = threading.Condition()
        self._waiting: deque[Window] = deque()
        self._open: set[Window] = set()
        self._encoding: tuple[Window, Iterator[torch.Tensor | None]] | None = None
        self._attempts: list[Attempt] = []
        self._readings: deque[Reading] = deque()
        self._stopping, self._turns, self._idle = False, 0, True
        self.blocks, self.fault = blocks, ""
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def mark(self) -> int | None:
        """Return a number that changes with each turn; None while there is nothing to do."""
        return None if self._idle else self._turns

    @property
    def native_id(self) -> int:
        """Return the thread's id in the system; 0 before it started."""
        return self._thread.native_id or 0

    @property
    def free_blocks(self) -> int:
        """Return the blocks that no window holds."""
        return len(self._free)

    @property
    def windows(self) -> int:
        """Return the windows that the pool has room for."""
        return self.blocks // (self._text_blocks + self._audio_blocks)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its turn; windows that are open fail."""
        with self._wakes:
            self._stopping = True
            self._wakes.notify()
        self._thread.join()

    def encode(self, window: Window) -> Future[None]:
        """Encode a window once blocks are free; it must be released, even if this fails or is cancelled."""
        self._put(window)
        return window.encoded

    def decode(self, attempt: Attempt) -> Future[Any]:
        """Decode an encoded window, together with all others; one attempt of a window at a time."""
        self._put(attempt)
        return attempt.done

    def read(self, reading: Reading) -> Future[Any]:
        """Pass tokens of an encoded window through the decoder, while no attempt of it runs."""
        self._put(reading)
        return reading.done

    def release(self, window: Window) -> None:
        """Release a window's blocks, and drop all computation for it."""
        with self._wakes:
            window.released = True
            self._wakes.notify()

    def _put(self, command: Command) -> None:
        with self._wakes:
            if self._stopping or self.fault:
                raise StepFailed(self.fault or "the engine has stopped")
            self._commands.append(command)
            self._wakes.notify()

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while self._take_commands():
                self._turns += 1
                self._admit()
                self._encode_part()
                self._read_one()
                self._step()
        except Exception as error:
            log.exception("the engine thread ended")
            self.fault = f"the engine thread ended: {reason(error)}"
        self._fail_all(StepFailed(self.fault or "the node is stopping"))

    def _take_commands(self) -> bool:
        """Wait for something to do, take the new commands and drop released windows; False: stop."""
        with self._wakes:
            while not (self._stopping or self._commands or self._busy()):
                self._idle = True
                self._wakes.wait()
            self._idle = False
            commands, self._commands = self._commands, deque()
        for command in commands:
            if not _future(command).set_running_or_notify_cancel():
                continue
            if isinstance(command, Window):
                self._waiting.append(command)
            elif isinstance(command, Attempt):
                self._attempts.append(command)
            else:
                self._readings.append(command)
        self._drop_released()
        return not self._stopping

    def _busy(self) -> bool:
        left = any(window.released for window in (*self._open, *self._waiting))
        return left or bool(self._encoding or self._attempts or self._readings or self._admissible())

    def _admissible(self) -> bool:
        return bool(self._waiting) and len(self._free) >= self._text_blocks + self._audio_blocks

    def _drop_released(self) -> None:
        self._waiting = deque(each for each in self._waiting if not each.released)
        self._attempts = [each for each in self._attempts if not each.window.released]
        self._readings = deque(each for each in self._readings if not each.window.released)
        if self._encoding is not None and self._encoding[0].released:
            self._encoding = None
        for window in [window for window in self._open if window.released]:
            self._open.remove(window)
            for block in (*window.text, *window.audio):
                self._free.put(block)

    def _admit(self) -> None:
        """Begin to encode the next window that waits, if none is being encoded and there are blocks."""
        if self._encoding is None and self._admissible():
            window = self._waiting.popleft()
            assert window.mel is not None
            window.text = tuple(self._free.take() for _ in range(self._text_blocks))
            window.audio = tuple(self._free.take() for _ in range(self._audio_blocks))
            self._open.add(window)
            self._encoding = window, self.encoder.steps(window.mel)
            window.mel = None

    def _encode_part(self) -> None:
        if self._encoding is None:
            return
        window, steps = self._encoding
        try:
            if (output := next(steps)) is None:
                return
            self.decoder.store(output, window.audio)
            window.encoded.set_result(None)
        except Exception as error:
            self._require_device(error)
            window.encoded.set_exception(StepFailed(f"encoding failed: {reason(error)}"))
        self._encoding = None

    def _read_one(self) -> None:
        if not self._readings:
            return
        reading = self._readings.popleft()
        try:
            reading.done.set_result(self.batch.read(reading))
        except Exception as error:
            self._require_device(error)
            reading.done.set_exception(StepFailed(f"a step failed: {reason(error)}"))

    def _step(self) -> None:
        if not self._attempts:
            return
        try:
            ended = self.batch.step(self._attempts)
        except Exception as error:
            self._require_device(error)
            ended = self._one_by_one(self._attempts)
        self.tokens += len(self._attempts)
        self._attempts = [each for each in self._attempts if each not in ended]

    def _one_by_one(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Step each attempt alone, so that only those whose own step fails end."""
        ended = []
        for attempt in attempts:
            try:
                ended += self.batch.step([attempt])
            except Exception as error:
                attempt.done.set_exception(StepFailed(f"a step failed: {reason(error)}"))
                ended.append(attempt)
        return ended

    def _require_device(self, error: Exception) -> None:
        """Raise the error if the device fails at a trivial sum: the node must then end."""
        log.warning("a step failed", exc_info=error)
        try:
            assert int(torch.ones(1, device=self.decoder.device).add(1)) == 2
        except RuntimeError:
            raise error from None

    def _fail_all(self, error: KvferryError) -> None:
        with self._wakes:
            commands = [*self._commands]
            self._commands.clear()
        pending = [*self._attempts, *self._readings, *self._waiting, *commands]
        if self._encoding is not None:
            pending.append(self._encoding[0])
        for each in pending:
            if not _future(each).done():
                _future(each).set_exception(error)


def _future(command: Command) -> Future[Any]:
    return command.encoded if isinstance(command, Window) else command.done

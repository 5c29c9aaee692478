"""AudioFile: decodes an audio file to mono samples at 16 kHz as it is read (PyAV), with bounds on length and format."""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np
import torch
from av.audio.resampler import AudioResampler

from kvferry.engine.speech.containers import mp4_fault, readable
from kvferry.engine.speech.log_mel import RATE
from kvferry.protocol.errors import InvalidRequest, reason

MAX_CHANNELS, MIN_RATE, MAX_RATE = 64, 4000, 768_000
"""Maximum of a file's channels, lowest and highest sampling rate in Hz: at a low rate few bytes are hours of audio."""
_FORMATS = {
    b"RIFF": "wav",
    b"RF64": "wav",
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"\x1aE\xdf\xa3": "matroska",
    b"ID3": "mp3",
}
"""Formats of FFmpeg by a file's first bytes. In other formats a file could name further files, or addresses."""
_FULL_SCALE = 32768.0


class AudioFile:
    """Audio file that is decoded as it is read. Not thread-safe; calls take CPU time.

    Raises InvalidRequest naming the bound, or that the file cannot be decoded. max_seconds: longest file. field: where
    the client wrote it, for errors. bound: who sets max_seconds."""

    def __init__(
        self, data: bytes, max_seconds: float, field: str = "file", bound: str = "--max-audio-seconds"
    ) -> None:
        self._max_seconds, self._decoded, self._field, self._bound = max_seconds, 0, field, bound
        try:
            form = self._format(data)
            if form == "mp4" and (fault := mp4_fault(data)):
                raise self._undecodable(fault)
            self._container = av.open(readable(data, form), "r", format=form, metadata_errors="ignore")
            stream = next(iter(self._container.streams.audio), None)
        except (av.FFmpegError, ValueError, EOFError) as error:
            raise self._undecodable(reason(error)) from error
        if stream is None:
            raise self._undecodable("it has no audio")
        if not MIN_RATE <= (stream.rate or 0) <= MAX_RATE:
            bounds = f"{MIN_RATE} to {MAX_RATE} Hz, got {stream.rate or 0}"
            raise self._refused(f"must have a sampling rate of {bounds}")
        if not 0 < stream.channels <= MAX_CHANNELS:
            raise self._refused(f"must have 1 to {MAX_CHANNELS} channels")
        if (duration_us := self._container.duration) is not None:
            self._check(duration_us / 1e6)
        self._stream = stream
        self._pieces = self._decode()
        self._rest = torch.empty(0)

    def read(self, samples: int) -> torch.Tensor:
        """Return the next samples, float32 in -1 … 1; fewer at the end."""
        parts, count = [self._rest], len(self._rest)
        while count < samples and (piece := next(self._pieces, None)) is not None:
            parts.append(torch.from_numpy(piece.reshape(-1)).float() / _FULL_SCALE)
            count += len(parts[-1])
        joined = torch.cat(parts)
        self._rest = joined[samples:].clone()
        return joined[:samples]

    def close(self) -> None:
        """Free the decoder."""
        self._container.close()

    def _decode(self) -> Iterator[np.ndarray]:
        """Yield int16 samples. 16 bits, because FFmpeg mixes channels of floats without normalising."""
        resampler = AudioResampler(format="s16", layout="mono", rate=RATE)
        try:
            for frame in self._container.decode(self._stream):
                frame.pts = None
                for part in resampler.resample(frame):
                    yield self._counted(part.to_ndarray())
            for part in resampler.resample(None):
                yield self._counted(part.to_ndarray())
        except (av.FFmpegError, ValueError, EOFError) as error:
            raise self._undecodable(f"after {self._decoded / RATE:.1f} s: {reason(error)}") from error
        if not self._decoded:
            raise self._undecodable("it has no samples")

    def _counted(self, samples: np.ndarray) -> np.ndarray:
        self._decoded += samples.size
        self._check(self._decoded / RATE)
        return samples

    def _check(self, seconds: float) -> None:
        if seconds > self._max_seconds:
            raise self._refused(f"must not be longer than {self._max_seconds:g} s ({self._bound})")

    def _format(self, data: bytes) -> str:
        for magic, name in _FORMATS.items():
            if data.startswith(magic):
                return name
        if data[4:8] == b"ftyp":
            return "mp4"
        if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
            return "mp3"
        raise self._undecodable("it is not WAV, MP3, FLAC, Ogg, MP4 or WebM")

    def _undecodable(self, why: str) -> InvalidRequest:
        return self._refused(f"cannot be decoded: {why}")

    def _refused(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"{self._field} {why}", param=self._field)

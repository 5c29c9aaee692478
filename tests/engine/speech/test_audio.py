"""Audio files are decoded to 16 kHz mono, and hostile ones refused within bounds."""

from __future__ import annotations

import io
import struct
import time
import wave
from typing import Any

import av
import numpy as np
import pytest
import torch

from kvferry.engine.speech.audio import AudioFile
from kvferry.protocol.errors import InvalidRequest

FORMATS = {
    "wav": ("wav", "pcm_s16le"),
    "flac": ("flac", "flac"),
    "opus": ("ogg", "libopus"),
    "mp3": ("mp3", "libmp3lame"),
    "mp4": ("mp4", "aac"),
    "webm": ("webm", "libopus"),
}
TONE_HZ = 1000


def tone(seconds: float, rate: int = 48_000, channels: int = 1) -> np.ndarray:
    """Return int16 [samples, channels], the first channel loud, the others silent."""
    samples = np.zeros((round(seconds * rate), channels), np.int16)
    samples[:, 0] = 16_000 * np.sin(2 * np.pi * TONE_HZ * np.arange(len(samples)) / rate)
    return samples


def wav(samples: np.ndarray, rate: int = 48_000) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((samples.shape[1], 2, rate, 0, "NONE", ""))
        file.writeframes(samples.tobytes())
    return out.getvalue()


def encoded(name: str, samples: np.ndarray, rate: int = 48_000) -> bytes:
    out, (form, codec) = io.BytesIO(), FORMATS[name]
    with av.open(out, "w", format=form) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout="mono")
        frame.sample_rate = rate
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            container.mux(packet)
    return out.getvalue()


def peak_hz(samples: torch.Tensor) -> float:
    return float(torch.fft.rfft(samples).abs().argmax()) * 16_000 / len(samples)


@pytest.mark.parametrize("name", FORMATS)
def test_a_tone_is_the_same_in_every_format(name: str) -> None:
    file = AudioFile(encoded(name, tone(1.0)), 10)
    parts = [file.read(7000), file.read(7000), file.read(100_000)]
    file.close()
    assert [len(part) for part in parts[:2]] == [7000, 7000]
    samples = torch.cat(parts)
    assert len(samples) == pytest.approx(16_000, abs=1700), "lossy formats add padding"
    assert peak_hz(samples[2000:14_000]) == pytest.approx(TONE_HZ, abs=5)
    assert float(samples.abs().max()) == pytest.approx(16_000 / 32_768, abs=0.05)


def test_samples_at_16_khz_are_those_of_the_file() -> None:
    samples = tone(0.5, 16_000)
    read = AudioFile(wav(samples, 16_000), 10).read(1 << 20)
    assert torch.equal(read, torch.from_numpy(samples[:, 0].astype(np.float32) / 32_768))


def test_channels_are_mixed_without_clipping() -> None:
    both = np.repeat(tone(0.2), 2, axis=1)
    assert float(AudioFile(wav(both), 10).read(1 << 20).abs().max()) == pytest.approx(16_000 / 32_768, abs=0.02)


def hostile() -> dict[str, tuple[bytes, str]]:
    good, flac = wav(tone(1.0)), encoded("flac", tone(1.0))
    huge = bytearray(good)
    struct.pack_into("<I", huge, 40, 0x7FFFFFFE)
    many = bytearray(flac)
    many[21] |= 0x0F  # billions of samples, says the header
    slow = bytearray(good)
    struct.pack_into("<I", slow, 24, 1)
    return {
        "empty": (b"", "cannot be decoded"),
        "magic alone": (b"fLaC", "cannot be decoded"),
        "header alone": (good[:44], "it has no samples"),
        "noise": (bytes(range(256)) * 16, "is not WAV"),
        "noise after magic": (b"OggS" + bytes(range(256)) * 16, "cannot be decoded"),
        "playlist": (b"#EXTM3U\nhttp://127.0.0.1:9/secret.ts\n", "is not WAV"),
        "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(64), "is not WAV"),
        "billions of samples": (bytes(many), "must not be longer than 10 s"),
        "one sample a second": (bytes(slow), "4000 to 768000 Hz"),
        "too long": (wav(tone(10.5, 8000), 8000), "must not be longer than 10 s"),
        "mp4 without audio": (b"\x00\x00\x00\x18ftypisom" + bytes(12), "cannot be decoded"),
    }


@pytest.mark.parametrize("name", hostile())
def test_a_hostile_file_is_refused_in_little_time(name: str) -> None:
    data, told = hostile()[name]
    began = time.thread_time()
    with pytest.raises(InvalidRequest, match=told) as error:
        AudioFile(data, 10).read(1 << 20)
    assert error.value.param == "file"
    assert time.thread_time() - began < 0.05


def test_a_header_that_promises_more_than_there_is_costs_nothing() -> None:
    """A recording that was cut off is heard as far as it goes."""
    huge = bytearray(wav(tone(1.0)))
    struct.pack_into("<I", huge, 40, 0x7FFFFFFE)
    assert len(AudioFile(bytes(huge), 10).read(1 << 20)) == pytest.approx(16_000, abs=50)


def test_the_bound_holds_where_a_header_tells_no_length() -> None:
    data = encoded("mp3", tone(12.0))
    with pytest.raises(InvalidRequest, match="must not be longer than 10 s"):
        AudioFile(data, 10).read(1 << 20)


def test_damage_in_the_middle_is_skipped() -> None:
    data = bytearray(encoded("flac", tone(4.0)))
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    assert len(AudioFile(bytes(data), 10).read(1 << 20)) == pytest.approx(64_000, abs=8000)

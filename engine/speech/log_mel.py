"""LogMel: log-mel spectrograms as Whisper was trained on (Radford et al. 2022), in PyTorch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

RATE = 16_000
"""Samples per second."""
HOP, FFT = 160, 400
"""Samples between frames, and samples in a transformed window."""
EDGE = FFT // 2
"""Samples on each side of a window that its first and last frames reach beyond it."""
_NOTHING = torch.empty(0)
_RANGE = 8.0
"""Powers of ten below the peak at which a spectrogram is cut off."""
_LINEAR_HZ, _MEL_STEP = 1000.0, 200.0 / 3.0
_LOG_STEP = math.log(6.4) / 27.0


class LogMel:
    """Spectrograms of windows, whose dynamic range is measured from the loudest sound so far."""

    def __init__(self, mels: int, device: torch.device) -> None:
        self._filters = mel_filters(mels).to(device)
        self._window = torch.hann_window(FFT, device=device)
        self._device = device

    def powers(
        self, samples: torch.Tensor, before: torch.Tensor = _NOTHING, after: torch.Tensor = _NOTHING
    ) -> torch.Tensor:
        """Return log10 of the mel powers, float32 [mels, samples / HOP], of float32 samples in -1 … 1.

        before, after: up to EDGE samples on both sides; what is missing is mirrored."""
        wide, end = F.pad(samples[None], (EDGE, EDGE), mode="reflect")[0], EDGE + len(samples)
        wide[EDGE - len(before) : EDGE], wide[end : end + len(after)] = before, after
        spectrum = torch.stft(wide.to(self._device), FFT, HOP, window=self._window, center=False, return_complex=True)
        magnitudes = (spectrum[..., :-1].abs() ** 2).contiguous()
        return (self._filters @ magnitudes).clamp_(min=1e-10).log10()

    def __call__(
        self,
        samples: torch.Tensor,
        peak: float = -math.inf,
        before: torch.Tensor = _NOTHING,
        after: torch.Tensor = _NOTHING,
    ) -> tuple[torch.Tensor, float]:
        """Return the model's input and its peak. peak: log10 of the largest power before these samples.

        before, after: see `powers`; with them a window has the spectrogram that it has within its file.

        The reference takes the peak of the whole file, which is unknown while the file is being decoded."""
        powers = self.powers(samples, before, after)
        peak = max(peak, float(powers.max()))
        return (powers.clamp_(min=peak - _RANGE) + 4.0) / 4.0, peak


def mel_filters(mels: int) -> torch.Tensor:
    """Return Slaney's triangular filters, float32 [mels, FFT / 2 + 1], each of the same area (Slaney 1998)."""
    bins = torch.linspace(0, RATE / 2, FFT // 2 + 1, dtype=torch.float64)
    edges = _hertz(torch.linspace(0.0, _mel(RATE / 2), mels + 2, dtype=torch.float64))
    widths = edges.diff()
    slopes = edges[:, None] - bins
    down, up = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    areas = 2.0 / (edges[2:] - edges[:-2])
    return (torch.minimum(down, up).clamp_(min=0) * areas[:, None]).float()


def _mel(hertz: float) -> float:
    return _LINEAR_HZ / _MEL_STEP + math.log(hertz / _LINEAR_HZ) / _LOG_STEP


def _hertz(mel: torch.Tensor) -> torch.Tensor:
    """Return frequencies: linear in mels up to 1 kHz, then exponential."""
    bend = _LINEAR_HZ / _MEL_STEP
    return torch.where(mel < bend, mel * _MEL_STEP, _LINEAR_HZ * torch.exp(_LOG_STEP * (mel - bend)))

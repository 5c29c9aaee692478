"""Spectrograms are those of transformers' feature extractor."""

import math

import pytest
import torch

from kvferry.engine.speech.log_mel import EDGE, LogMel
from tests.engine.speech.conftest import noise


@pytest.mark.parametrize("mels", [80, 128])
def test_a_spectrogram_is_that_of_transformers(mels: int) -> None:
    from transformers import WhisperFeatureExtractor

    samples = noise(1.0) * torch.linspace(0, 1, 16_000)
    extractor = WhisperFeatureExtractor(feature_size=mels, chunk_length=1)
    expected = extractor(samples.numpy(), sampling_rate=16_000, return_tensors="pt").input_features[0]
    found, peak = LogMel(mels, torch.device("cpu"))(samples)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    assert peak == pytest.approx(float(found.max()) * 4 - 4, abs=1e-4)


def test_a_window_has_the_spectrogram_that_it_has_within_its_file() -> None:
    log_mel, samples = LogMel(80, torch.device("cpu")), noise(3.0)
    whole, peak = log_mel(samples)
    window = samples[16_000:32_000]
    found, _ = log_mel(window, peak, samples[16_000 - EDGE : 16_000], samples[32_000 : 32_000 + EDGE])
    torch.testing.assert_close(found, whole[:, 100:200], atol=1e-5, rtol=0)
    assert float((log_mel(window, peak)[0] - whole[:, 100:200]).abs().max()) > 0.1


def test_the_loudest_sound_so_far_bounds_the_range() -> None:
    log_mel, quiet = LogMel(80, torch.device("cpu")), noise(0.5) * 1e-4 * torch.linspace(0, 1, 8000)
    alone, _ = log_mel(quiet)
    after, peak = log_mel(quiet, peak=12.0)
    assert peak == 12.0
    assert float(after.min()) == float(after.max()) == 2.0, "all of it is more than eight powers of ten below"
    assert float(alone.max()) > float(alone.min())
    assert math.isfinite(float(log_mel(torch.zeros(16_000))[0].sum()))

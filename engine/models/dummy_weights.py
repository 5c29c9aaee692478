"""Random weights for any decoder config (load_format dummy), to measure a model without its checkpoint."""

from __future__ import annotations

from zlib import crc32

import torch

from kvferry.engine.models.config import DecoderConfig
from kvferry.engine.models.weights import PlainWeights

_PERIOD = 1_048_573
"""Period of the numbers: a prime, so that no two rows of a matrix begin at the same number."""
_SPREAD = 0.0346
"""Bound of the uniform numbers, for a standard deviation of 0.02, as models are initialised."""


class DummyWeights(PlainWeights):
    """Random weights for any decoder config, equal bit for bit on every device and machine, so that nodes agree.

    Norms scale by one, biases are zero. Implements `engine.models.weights.Weights`."""

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        self._config = config
        whole = torch.randint(-127, 128, (_PERIOD,), generator=torch.Generator().manual_seed(seed))
        self._numbers = whole.to(torch.float32).mul_(_SPREAD / 127)

    def read(self, name: str, out: torch.Tensor) -> None:
        if out.dim() <= 1:
            offset = 0.0 if ".mixer." in name else self._config.family.norm_offset
            out.fill_(0.0 if name.endswith("bias") else 1.0 - offset)
            return
        flat = out.view(-1)
        begin, rounds = crc32(name.encode()) % _PERIOD, len(flat) // _PERIOD
        numbers = self._numbers.roll(-begin).to(out.device, out.dtype)
        flat[: rounds * _PERIOD].view(rounds, _PERIOD).copy_(numbers.expand(rounds, -1))
        flat[rounds * _PERIOD :] = numbers[: len(flat) - rounds * _PERIOD]

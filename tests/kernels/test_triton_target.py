"""What kernels take a device to be able to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kvferry.kernels.triton import device_features, eight_bits

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("capability", "e4m3", "bfloat16"),
    [
        ((8, 0), False, False),
        ((8, 6), False, False),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((10, 0), True, True),
    ],
)
def test_instructions_of_a_capability(
    capability: tuple[int, int], e4m3: bool, bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ada, 8.9, converts e4m3 and has no arithmetic of bfloat16 pairs: kernels that use it do not compile there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(device_features, "_capability", device_features._capability.__wrapped__)
    assert (device_features.hardware_e4m3(CUDA), device_features.hardware_bfloat16(CUDA)) == (e4m3, bfloat16)


def test_other_devices_have_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_features, "_capability", device_features._capability.__wrapped__)
    assert not device_features.hardware_e4m3(torch.device("cpu"))
    assert not device_features.on_amd(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not device_features.hardware_bfloat16(CUDA)


@pytest.mark.parametrize(
    ("architecture", "e4m3"), [("gfx90a:sramecc+:xnack-", False), ("gfx942:sramecc+:xnack-", False), ("gfx950", True)]
)
def test_instructions_of_amd(architecture: str, e4m3: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """gfx942 converts e4m3fnuz, in which the bits of our e4m3 stand for half the number."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=architecture))
    for name in ("_architecture", "_capability"):
        monkeypatch.setattr(device_features, name, getattr(device_features, name).__wrapped__)
    assert device_features.on_amd(CUDA)
    assert device_features.hardware_e4m3(CUDA) is e4m3
    assert not device_features.hardware_bfloat16(CUDA)
    pool: Any = SimpleNamespace(dtype=torch.float8_e4m3fn, device=CUDA)
    assert eight_bits.peak_of(pool) == (eight_bits.BY_HARDWARE.value if e4m3 else 448)


def test_products_of_float32_in_a_layer_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton refuses tf32 on gfx950."""
    short = torch.zeros(1, dtype=torch.bfloat16)
    assert device_features.precision_of(short) == "tf32"
    monkeypatch.setattr(device_features, "_architecture", lambda device: "gfx950:sramecc+:xnack-")
    assert device_features.precision_of(short) == "bf16x3"
    assert device_features.precision_of(short.float()) == "ieee"

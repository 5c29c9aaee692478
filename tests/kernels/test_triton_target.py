"""What kernels take a device to be able to do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvferry.kernels.triton import device_features

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
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not device_features.hardware_bfloat16(CUDA)

"""Which lanes a node's link asks of UCX."""

from __future__ import annotations

import pytest
import torch

from kvferry.worker.link_factory import platform_of


def test_lanes_follow_torch_s_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls GPUs of AMD cuda, too."""
    assert not platform_of(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", None)
    assert platform_of(torch.device("cuda", 1)) == "cuda"
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    assert platform_of(torch.device("cuda", 1)) == "rocm"

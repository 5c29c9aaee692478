"""The choice of an implementation by name."""

from __future__ import annotations

import pytest
import torch

import kvferry.kernels.cpu
from kvferry.kernels.ops import select
from kvferry.protocol.errors import ConfigError


def test_a_cpu_runs_its_own_kernels_where_they_are_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cpu")
    assert select("reference", device).name == "reference"
    assert select("auto", device).name == ("reference" if kvferry.kernels.cpu.instruction_set() is None else "cpu")
    monkeypatch.setattr(kvferry.kernels.cpu, "instruction_set", lambda: None)
    assert select("auto", device).name == "reference"
    assert "not compiled" in caplog.text
    with pytest.raises(ConfigError, match="extension") as refusal:
        select("cpu", device)
    assert refusal.value.param == "kernels"


def test_auto_takes_triton_on_a_gpu() -> None:
    pytest.importorskip("triton")
    assert select("auto", torch.device("cuda")).name == "triton"
    assert select("triton", torch.device("cuda")).name == "triton"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'flash'") as refusal:
        select("flash", torch.device("cpu"))
    assert refusal.value.param == "kernels"

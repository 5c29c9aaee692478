"""The choice of an implementation by name."""

from __future__ import annotations

import pytest
import torch

from kernels.ops import select
from protocol.errors import ConfigError


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_cpu_runs_the_reference(name: str) -> None:
    assert select(name, torch.device("cpu")).name == "reference"


def test_auto_takes_triton_on_a_gpu() -> None:
    pytest.importorskip("triton")
    assert select("auto", torch.device("cuda")).name == "triton"
    assert select("triton", torch.device("cuda")).name == "triton"


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'flash'") as refusal:
        select("flash", torch.device("cpu"))
    assert refusal.value.param == "attention"

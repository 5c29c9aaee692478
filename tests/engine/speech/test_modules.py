"""The vocabulary projection gives the same logits for a few rows, which it multiplies as columns, as for many."""

from __future__ import annotations

import pytest
import torch

from kvferry.engine.speech.modules import MAX_COLUMNS, Vocabulary
from kvferry.kernels.torch_operations import TorchLinear


@pytest.mark.parametrize("count", [1, 2, MAX_COLUMNS, MAX_COLUMNS + 1])
def test_few_rows_are_multiplied_as_columns(count: int) -> None:
    weight, hidden = torch.randn(300, 16), torch.randn(count, 16)
    found = Vocabulary(TorchLinear(weight, None), weight).logits(hidden)
    assert found.is_contiguous()
    torch.testing.assert_close(found, hidden @ weight.T)

"""What Triton's interpreter lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter holds bfloat16 as uint16 and multiplies those integers in `tl.dot` (Triton 3.9); here its
    operands are widened first, which is exact, and multiplied in float64, so that the bits of a product do not depend
    on its shape. Its rounding to bfloat16 truncates, which the tolerances cover."""
    if DEVICE != "cpu":
        return

    def widened(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        found = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(found.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widened)

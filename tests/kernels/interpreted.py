"""What Triton's interpreter lacks, and what it repeats for nothing."""

from __future__ import annotations

import functools
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


class PatchOnce:
    """Patches `triton.language` once for each module in a launch.

    Triton 3.9 does so at each call in a kernel, which takes a third of the time of these tests."""

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._launch = interpreter.GridExecutor.__call__
        self._patched: set[int] = set()

    def install(self) -> None:
        interpreter._patch_lang = self._patch_module
        interpreter.GridExecutor.__call__ = lambda grid, *args, **options: self._begin(grid, *args, **options)

    def _begin(self, grid: Any, *args: Any, **options: Any) -> None:
        """Begin a launch: its end takes back what it patched."""
        self._patched.clear()
        self._launch(grid, *args, **options)

    def _patch_module(self, function: Any) -> Any:
        module = id(function.__globals__)
        if module in self._patched:
            return None
        self._patched.add(module)
        return self._patch(function)


_numpy_type = interpreter._get_np_dtype
_numpy_scalar = functools.cache(_numpy_type)


def numpy_type(kind: Any) -> Any:
    """NumPy's type for one of Triton's, which makes a dict of all of them at each call."""
    element = kind.element_ty if isinstance(kind, tl.block_type) else kind
    return _numpy_type(element) if isinstance(element, tl.pointer_type) else _numpy_scalar(element)


if DEVICE == "cpu":
    PatchOnce().install()
    interpreter._get_np_dtype = numpy_type

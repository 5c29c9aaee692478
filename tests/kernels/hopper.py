"""A Hopper GPU that is not there: a driver that only names its target stands in for CUDA's, and launches stop after
the compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER_SHARED_BYTES = 227 * 1024


class NamedTarget:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@pytest.fixture(name="compiled")
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Compiled kernels by name."""
    found: dict[str, Any] = {}

    def compile_only(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        found[kernel.__name__] = kernel.run(*args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "__getitem__", lambda kernel, grid: partial(compile_only, kernel, grid=grid))
    driver.set_active(NamedTarget())
    return found

"""GPUs that are not there: a driver that only names its target stands in for a real one, and launches stop after the
compiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER_SHARED_BYTES = 227 * 1024


HOPPER = GPUTarget("cuda", 90, 32)
MI300, MI350 = GPUTarget("hip", "gfx942", 64), GPUTarget("hip", "gfx950", 64)
SHARED_BYTES = {HOPPER.arch: HOPPER_SHARED_BYTES, MI300.arch: 64 * 1024, MI350.arch: 160 * 1024}
"""Memory that the threads of a program share, by architecture, in bytes."""


class NamedTarget:
    def __init__(self, target: GPUTarget = HOPPER) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        """Return a number of the target's own: Triton keeps the compiler of the first target that it meets on one."""
        return list(SHARED_BYTES).index(self._target.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@pytest.fixture(name="compiled")
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Kernels compiled for a Hopper GPU, by name."""
    return compiled_for(HOPPER, monkeypatch)


def compiled_for(target: GPUTarget, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Compile what is launched from now on for the target. Return the kernels by name."""
    found: dict[str, Any] = {}

    def compile_only(kernel: Any, *args: Any, grid: Any, **options: Any) -> None:
        found[kernel.__name__] = kernel.run(*args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "__getitem__", lambda kernel, grid: partial(compile_only, kernel, grid=grid))
    driver.set_active(NamedTarget(target))
    return found

"""CPU backend: C++ kernels for several instruction sets; the best one that runs is chosen.

If the package was installed without a C++ compiler, the extension is absent: `instruction_set()` is None and the
reference backend serves."""

from __future__ import annotations

from kvferry.kernels.cpu.extension import instruction_set, instruction_sets
from kvferry.kernels.cpu.ops import CpuOps

__all__ = ["CpuOps", "instruction_set", "instruction_sets"]

"""Triton's other kernels, compiled for AMD GPUs."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.own_process import run_cases


def test_kernels_compile_for_amd(tmp_path: Path) -> None:
    run_cases({"TRITON_CACHE_DIR": str(tmp_path)}, "triton_compile_amd.py")

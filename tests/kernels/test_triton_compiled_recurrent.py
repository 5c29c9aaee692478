"""Triton's kernels of recurrent layers, compiled for GPUs of NVIDIA and AMD."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.own_process import run_cases


def test_kernels_compile_for_each_architecture(tmp_path: Path) -> None:
    run_cases({"TRITON_CACHE_DIR": str(tmp_path)}, "triton_compile_recurrent.py")

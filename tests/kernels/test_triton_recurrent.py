"""Triton's kernels of recurrent layers."""

from __future__ import annotations

from tests.kernels.own_process import ON_A_GPU, run_cases


def test_recurrent_layers() -> None:
    run_cases(ON_A_GPU, "triton_recurrent_cases.py")

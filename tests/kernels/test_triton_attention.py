"""Triton's kernels of attention, rotation, norms and gates, and the cache in 8 bits."""

from __future__ import annotations

from tests.kernels.own_process import ON_A_GPU, run_cases


def test_kernels_agree_with_the_reference() -> None:
    run_cases(ON_A_GPU, "triton_cases.py", "triton_cache_cases.py")

"""Triton's kernels of latent attention."""

from __future__ import annotations

from tests.kernels.own_process import ON_A_GPU, run_cases


def test_attention_to_cached_latents() -> None:
    run_cases(ON_A_GPU, "triton_latent_cases.py")

"""Triton's products with weights in codes, by themselves and in models."""

from __future__ import annotations

from tests.kernels.own_process import ON_A_GPU, run_cases


def test_products_with_codes_are_those_of_the_dequantised_weights() -> None:
    run_cases(ON_A_GPU, "triton_product_cases.py")


def test_models_run_as_they_are_stored() -> None:
    run_cases(ON_A_GPU, "triton_model_cases.py", "triton_shaped_cases.py")

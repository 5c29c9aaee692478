"""Runs the files of Triton's cases in processes of their own: whether Triton interprets is decided when it is imported,
and no other test may inherit the choice."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def collect(file: str, **environment: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)],
        env=inherited | environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]


def test_kernels_agree_with_the_reference() -> None:
    collect("triton_cases.py", **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}))


def test_products_with_codes_are_those_of_the_dequantised_weights() -> None:
    collect("triton_product_cases.py", **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}))


def test_k_and_v_in_8_bits() -> None:
    collect("triton_cache_cases.py", **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}))


def test_attention_to_cached_latents() -> None:
    collect("triton_latent_cases.py", **({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}))


def test_models_run_as_they_are_stored() -> None:
    collect("triton_model_cases.py", TRITON_INTERPRET="1")


def test_decode_steps_are_replayed() -> None:
    collect("triton_graph_cases.py", TRITON_INTERPRET="1")


def test_tokens_are_drawn_as_by_the_reference() -> None:
    collect("triton_draw_cases.py", TRITON_INTERPRET="1")


def test_logits_are_adjusted_as_in_pytorch() -> None:
    collect("triton_adjust_cases.py", TRITON_INTERPRET="1")


def test_ranks_compute_by_them() -> None:
    collect("triton_ranks_cases.py", TRITON_INTERPRET="1")


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    collect("triton_compile.py", TRITON_CACHE_DIR=str(tmp_path))

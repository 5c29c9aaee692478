"""Decode steps that are replayed, what draws their tokens, and ranks that compute, by Triton's kernels."""

from __future__ import annotations

import pytest

from tests.kernels.own_process import ON_A_GPU, run_cases


@pytest.mark.timeout(1500)
def test_steps_are_those_of_the_reference() -> None:
    run_cases(
        ON_A_GPU,
        "triton_stream_cases.py",
        "triton_graph_cases.py",
        "triton_draw_cases.py",
        "triton_adjust_cases.py",
        "triton_ranks_cases.py",
    )

"""Decode steps that are replayed, and what draws their tokens, by Triton's kernels."""

from __future__ import annotations

from tests.kernels.own_process import ON_A_GPU, run_cases


def test_streams_are_those_of_the_reference() -> None:
    run_cases("triton_stream_cases.py", ON_A_GPU)


def test_decode_steps_are_replayed() -> None:
    run_cases("triton_graph_cases.py", ON_A_GPU)


def test_tokens_are_drawn_as_by_the_reference() -> None:
    run_cases("triton_draw_cases.py", ON_A_GPU)


def test_logits_are_adjusted_as_in_pytorch() -> None:
    run_cases("triton_adjust_cases.py", ON_A_GPU)


def test_ranks_compute_by_them() -> None:
    run_cases("triton_ranks_cases.py", ON_A_GPU)

"""Steps with prompt chunks that are replayed, by Triton's kernels."""

from __future__ import annotations

import pytest

from tests.kernels.own_process import ON_A_GPU, run_cases


@pytest.mark.timeout(1500)
def test_steps_with_chunks_are_those_of_layers_one_by_one() -> None:
    run_cases(ON_A_GPU, "triton_chunk_graph_cases.py")

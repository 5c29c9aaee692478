"""Files of tests that take longest, half a minute and more. They begin first, and short ones fill what is left of the
processes' time."""

from __future__ import annotations

import pytest

LONGEST = frozenset(
    {
        "test_adapters_gguf.py",
        "test_comparisons.py",
        "test_described_truth.py",
        "test_gpu.py",
        "test_hostile_jobs.py",
        "test_hostile_requests.py",
        "test_local_parity.py",
        "test_rollouts.py",
        "test_router_bodies.py",
        "test_triton_attention.py",
        "test_triton_compiled.py",
        "test_triton_compiled_attention.py",
        "test_triton_latent.py",
        "test_triton_products.py",
        "test_triton_steps.py",
        "test_virtual.py",
    }
)


def begin_first(items: list[pytest.Item]) -> None:
    """The others keep their order, and so does each file."""
    items.sort(key=lambda item: item.path.name not in LONGEST)

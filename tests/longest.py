"""Files of tests that take longest, half a minute and more. They begin first, and short ones fill what is left of the
processes' time."""

from __future__ import annotations

import pytest

LONGEST = frozenset(
    {
        "test_adapter_live.py",
        "test_adapters_gguf.py",
        "test_any_grouping.py",
        "test_batches_live.py",
        "test_comparisons.py",
        "test_described_truth.py",
        "test_drafter.py",
        "test_elastic_adapter_live.py",
        "test_elastic_live.py",
        "test_gpu.py",
        "test_hostile_jobs.py",
        "test_hostile_requests.py",
        "test_hosts.py",
        "test_local_parity.py",
        "test_migration_sender.py",
        "test_openai_client.py",
        "test_openai_live.py",
        "test_pictures_live.py",
        "test_rank_processes.py",
        "test_renderer.py",
        "test_resumed_live.py",
        "test_rollouts.py",
        "test_router_bodies.py",
        "test_scaling.py",
        "test_serve_node.py",
        "test_speculation.py",
        "test_transfer_live.py",
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

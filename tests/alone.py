"""Test files of clusters that measure times, or count what a busy machine changes: routes, hand-overs, turns on shared
cores. No other cluster runs beside them. All others run three at a time, since they mostly wait."""

from __future__ import annotations

import pytest

ALONE = frozenset(
    {
        "test_canary_live.py",
        "test_chaos.py",
        "test_cluster.py",
        "test_fairness.py",
        "test_parity.py",
        "test_shared_cores.py",
        "test_simulated_live.py",
        "test_storm.py",
    }
)
TOGETHER = frozenset(
    {
        "test_local_user.py",
        "test_other_tenant.py",
        "test_pod_network.py",
        "test_redis_reader.py",
        "test_redis_writer.py",
        "test_without_a_key.py",
    }
)
"""Attackers that share one cluster, which one process starts for all of them."""


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests of these files: `pytest -m alone` selects them."""
    for item in items:
        if item.path.name in ALONE | TOGETHER:
            item.add_marker(pytest.mark.alone)

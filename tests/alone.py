"""Test files of clusters that measure times, or count what a busy machine changes: routes, hand-overs, turns on shared
cores. No other cluster runs beside them. All others run two at a time, since they mostly wait."""

from __future__ import annotations

import pytest

ALONE = frozenset(
    {
        "test_abort_storms.py",
        "test_canary_live.py",
        "test_chaos.py",
        "test_cluster.py",
        "test_drains.py",
        "test_elastic_live.py",
        "test_fairness.py",
        "test_faults.py",
        "test_parity.py",
        "test_redis_faults.py",
        "test_shared_cores.py",
        "test_simulated_live.py",
        "test_storm.py",
    }
)
FOLDERS = frozenset({"attack"})
"""Folders of such files: the attackers share one cluster."""


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests of these files and folders: `pytest -m alone` selects them."""
    for item in items:
        if item.path.name in ALONE or item.path.parent.name in FOLDERS:
            item.add_marker(pytest.mark.alone)

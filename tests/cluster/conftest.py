"""One shared cluster for the tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.local_cluster import LocalCluster, local_cluster


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[LocalCluster]:
    """`kvferry serve` with one prefill and one decode process on the demo model, each process started as
    users start it."""
    with local_cluster(forked=False) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """The shared cluster; afterwards every pool's books balance and nothing is in use."""
    yield shared_cluster
    shared_cluster.settle()

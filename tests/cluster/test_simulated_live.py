"""A simulation with the rates of a real cluster tells the times to first token that this has, within 20 %.

The machine that runs the tests is seldom quiet: what counts is the medians over some rounds, of those in which its
speed stayed about the same; the figures are printed (`pytest -s`). The short form has two or three rounds, whose
medians are no nearer than half; KVFERRY_TEST_SIMULATED=8 (`make test-simulated`) is the long one.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Sequence

import pytest

from benchmarks.load import Target
from benchmarks.simulated import KINDS, Round, played, table
from tests.local_cluster import MODEL, LocalCluster, local_cluster

BUSY, SHORT = 0.4, 3
ROUNDS = int(os.environ.get("KVFERRY_TEST_SIMULATED", SHORT))
LEAST_ROUNDS, REQUESTS, NEAR = (3, 20, 1.2) if ROUNDS > SHORT else (2, 12, 1.5)
STEADY, ENOUGH_S = 1.15, 50 * ROUNDS
"""Times that a simulated figure may be off, and that the machine may have become faster or slower in a round; and after
so many seconds no further round begins."""


def far(rounds: Sequence[Round]) -> dict[str, float]:
    """The figures that are off, by the medians over all rounds."""
    ratios = {kind: statistics.median(each.ratio(kind) for each in rounds) for kind in KINDS}
    return {kind: ratio for kind, ratio in ratios.items() if not 1 / NEAR <= ratio <= NEAR}


async def steady_rounds(cluster: LocalCluster) -> list[Round]:
    """As many as it takes to come near, else all that there is time for."""
    found: list[Round] = []
    began = time.monotonic()
    async for each in played(Target(cluster.url, MODEL), cluster.redis_url, ROUNDS, REQUESTS, BUSY):
        if each.drift() <= STEADY:
            found.append(each)
        near = len(found) >= LEAST_ROUNDS and not far(found)
        if near or time.monotonic() - began > ENOUGH_S:
            break
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_simulation_tells_what_a_cluster_does() -> None:
    with local_cluster("--prefill", "1", "--decode", "1") as cluster:
        rounds = asyncio.run(steady_rounds(cluster))
    if len(rounds) < LEAST_ROUNDS:
        pytest.skip(f"the machine kept its speed in {len(rounds)} rounds only")
    print(table(rounds))
    assert not far(rounds)

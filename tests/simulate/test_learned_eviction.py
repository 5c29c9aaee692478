"""Learned eviction against LRU, SLRU and an oracle, on traces of the simulator."""

from __future__ import annotations

import pytest

from benchmarks import agent_traces
from benchmarks.eviction import ORACLE, SIZES, Replay, workload


def found(name: str, order: str, blocks: int, seed: int = 0) -> int:
    return Replay(order, blocks, workload(name, seed)).found


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("tool-agents", 3000), ("tool-agents", 6000), *(("several-tools", blocks) for blocks in SIZES)],
)
def test_agents_with_tool_pauses_gain_at_least_half_of_what_an_oracle_would(name: str, blocks: int) -> None:
    slru, value, oracle = (found(name, order, blocks) for order in ("slru", "value", ORACLE))
    assert value - slru >= 0.5 * (oracle - slru) > 0


@pytest.mark.parametrize("named", [False, True])
def test_a_node_learns_within_a_minute_which_agents_come_back(named: bool) -> None:
    """These agents name no tools, so that only ages and earlier prompts tell their pauses from prompts that come once.

    Even their true distributions give about half of the way (ADR 014). It was a quarter while first prompts of agents
    and prompts that come once were of one class."""
    traces = [agent_traces.agent_trace(seed, 70.0, named=named) for seed in range(12)]
    slru, value, oracle = (
        sum(agent_traces.found(order, 291, each) for each in traces) for order in ("slru", "value", ORACLE)
    )
    assert value - slru >= 0.35 * (oracle - slru) > 0


@pytest.mark.parametrize(("name", "blocks"), [("documents", 3000), ("hot-prefix", 1500), ("agents", 6000)])
def test_where_nothing_is_to_gain_little_is_lost(name: str, blocks: int) -> None:
    lru, value = (found(name, order, blocks) for order in ("lru", "value"))
    assert value >= 0.99 * lru


def test_the_oracle_is_the_best() -> None:
    rates = {order: found("chat", order, 1500) for order in ("lru", "slru", "value", ORACLE)}
    assert max(rates, key=rates.__getitem__) == ORACLE
    assert rates["value"] > rates["slru"] > rates["lru"]

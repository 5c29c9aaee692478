"""Simulated nodes that keep in slower memories what their pools had."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from kvferry.cluster_state.index import on_tier
from kvferry.protocol.index_rows import rows_of
from kvferry.simulate.clock import Clock
from kvferry.simulate.fleet import Shape
from kvferry.simulate.node import Node
from kvferry.simulate.node_lease import lease_of
from kvferry.simulate.tiers import Tier
from kvferry.simulate.trace_request import Run
from kvferry.simulate.world import Loss
from tests.simulate.test_nodes import MACHINE, ask, played

SMALL = replace(MACHINE, blocks=64)
"""A block of 16 tokens is computed in 16 ms; two prompts of 500 tokens drive each other out of the pool."""
DISK = replace(SMALL, disk_blocks=1000, disk_block_s=0.001)
AGAIN = [ask(0, 0.0, 500, 2, "a"), ask(1, 2.0, 600, 2, "b"), ask(2, 4.0, 600, 2, "c"), ask(3, 6.0, 500, 2, "a")]


@pytest.mark.parametrize("prefill", [0, 1])
def test_what_left_the_pool_is_read_instead_of_computed(prefill: int) -> None:
    assert played(Shape(prefill, 1, SMALL), AGAIN).runs[3].ttft_s == pytest.approx(0.5, abs=0.01)
    again = played(Shape(prefill, 1, DISK), AGAIN).runs[3]
    assert again.cached_len == 496
    assert again.ttft_s == pytest.approx(31 * 0.001 + 0.004)


def test_what_takes_longer_to_read_is_computed() -> None:
    again = played(Shape(1, 1, replace(DISK, disk_block_s=0.0161)), AGAIN).runs[3]
    assert (again.cached_len, again.ttft_s) == (0, pytest.approx(0.5, abs=0.01))


def test_the_quickest_tier_is_read_first_and_the_next_one_goes_on() -> None:
    """A chain's end leaves host memory before its beginning; the disk has it, and the pool the first 11 blocks."""
    host = replace(DISK, host_blocks=1000, host_block_s=0.0001)
    assert played(Shape(1, 1, host), AGAIN).runs[3].ttft_s == pytest.approx(31 * 0.0001 + 0.004)
    long = [ask(0, 0.0, 1500, 2, "a"), ask(1, 4.0, 1900, 2, "b"), ask(2, 8.0, 1500, 2, "a")]
    machine = replace(host, blocks=130, host_blocks=190)
    again = played(Shape(1, 1, machine), long, "round-robin").runs[2]
    assert again.cached_len == 1488
    assert again.ttft_s == pytest.approx(53 * 0.0001 + 29 * 0.001 + 0.012)


def test_reads_of_one_node_wait_for_each_other() -> None:
    trace = [*AGAIN[:3], ask(3, 6.0, 1500, 2, "d"), ask(4, 9.0, 500, 2, "a"), ask(5, 9.0, 500, 2, "b")]
    slow = replace(DISK, blocks=120, disk_block_s=0.004)
    first, second = played(Shape(1, 1, slow), trace).runs[4:]
    assert sorted([first.ttft_s, second.ttft_s]) == [pytest.approx(0.128), pytest.approx(0.252)]


def test_a_full_tier_loses_what_was_used_longest_ago_from_its_end() -> None:
    tier = Tier("disk", 100, 0.001)
    chains = {name: [bytes([number, i]) * 8 for i in range(70)] for number, name in enumerate("ab")}
    tier.write(chains["a"])
    assert tier.run(chains["a"]) == 70
    tier.write(chains["b"])
    assert (tier.run(chains["a"]), tier.run(chains["b"])) == (0, 70)
    tier.write(chains["b"][:2])
    kept = Tier("disk", 150, 0.001)
    for name in "aba":
        kept.write(chains[name][:60])
    kept.write([bytes([9, i]) * 8 for i in range(60)])
    assert (kept.run(chains["a"][:60]), kept.run(chains["b"])) == (60, 0)
    stored, removed = tier.drain_changes()
    assert (set(stored), set(removed)) == (set(rows_of(chains["b"])), set())


def test_placement_goes_where_a_prompt_can_be_read() -> None:
    """Of two idle nodes the one whose disk has it, whichever was chosen last."""
    trace = [*AGAIN[:1], *(ask(i, 2.0 * i, 1000, 2, f"p{i}") for i in range(1, 7)), ask(7, 20.0, 500, 2, "a")]
    machine = replace(DISK, blocks=80)
    runs = played(Shape(2, 1, machine), trace).runs
    assert {run.prefill for run in runs} != {runs[0].prefill}
    assert runs[7].prefill is runs[0].prefill
    assert runs[7].cached_len == 496


@pytest.mark.parametrize(("kept", "cached"), [({"host_blocks": 0}, 496), ({"disk_blocks": 0, "host_blocks": 1000}, 0)])
def test_a_restarted_node_finds_its_disk_and_not_its_memory(kept: dict[str, int], cached: int) -> None:
    machine = replace(DISK, **kept)
    lost = Loss(3.0, "prefill", 0.0, back_s=1.0)
    _, again = played(Shape(1, 1, machine), [AGAIN[0], ask(1, 8.0, 500, 2, "a")], "round-robin", (lost,)).runs
    assert again.prefill is not None
    assert (again.prefill.epoch, again.cached_len) == (2, cached)


class Reader:
    """A node whose disk has the prompt that it is asked to compute: 31 blocks, read in 31 ms, and 4 tokens."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.node = Node("n", "prefill", "m", replace(DISK, host_blocks=100), self.clock, "slru")
        self.run, self.done = Run(AGAIN[0], 0.0), 0
        self.host, self.disk = self.node.tiers
        self.disk.write(self.run.ask.hashes[:31])
        self.node.compute(self.run, self._ended)

    def _ended(self) -> None:
        self.done += 1

    def until(self, at: float) -> None:
        over: list[None] = []
        self.clock.at(at, lambda: over.append(None))
        asyncio.run(self.clock.run(lambda: bool(over)))


def test_who_reads_waits_and_what_it_read_is_told_before_the_rest_is_computed() -> None:
    reader = Reader()
    reader.until(0.03)
    assert lease_of(reader.node).load.waiting_requests == 1
    assert (reader.node.dirty, reader.host.run(reader.run.ask.hashes)) == (False, 0)
    reader.until(0.032)
    assert lease_of(reader.node).load.waiting_requests == 0
    assert (reader.node.dirty, reader.host.run(reader.run.ask.hashes[:31])) == (True, 31)
    reader.until(0.04)
    assert reader.done == 1


def test_who_is_dropped_while_it_reads_leaves_nothing_and_may_come_again() -> None:
    reader = Reader()
    reader.until(0.02)
    reader.node.drop(reader.run)
    assert reader.node.memory.holds.num_held == 0
    reader.node.compute(reader.run, reader._ended)
    reader.until(0.04)
    assert list(reader.node.tiers.reading) == [reader.run]
    reader.until(0.1)
    assert reader.done == 1


def test_who_reads_as_its_node_dies_is_told_of() -> None:
    reader = Reader()
    reader.until(0.02)
    assert reader.node.die() == [reader.run]
    reader.until(0.1)
    assert reader.done == 0
    world = played(
        Shape(1, 1, replace(DISK, disk_block_s=0.01)), AGAIN, "round-robin", (Loss(6.1, "prefill", 0.0, 1.0),)
    )
    assert [(run.attempt, run.delivered) for run in world.runs] == [(0, 2)] * 3 + [(1, 2)]


def test_the_index_tells_what_each_tier_has() -> None:
    machine = replace(SMALL, host_blocks=40, disk_blocks=150)
    source = random.Random(1)
    trace = [ask(i, i / 4, source.randint(100, 600), 2, source.choice("abcdef")) for i in range(60)]
    world = played(Shape(2, 2, machine), trace, losses=(Loss(5.0, "prefill", 0.0, back_s=1.0),))
    asyncio.run(world.fleet.flush())
    for node in world.fleet.nodes.values():
        for tier in node.tiers:
            name = on_tier(node.name, tier.name)
            for run in world.runs:
                told = asyncio.run(world.fleet.store.longest_prefix(run.ask.hashes, {name: node.epoch}))
                assert told.get(name, 0) == tier.run(run.ask.hashes)

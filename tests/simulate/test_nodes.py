"""Simulated nodes: their arithmetic, and the books of their pools."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvferry.protocol.errors import ConfigError
from kvferry.simulate.compare import POLICIES
from kvferry.simulate.eviction import EVICTIONS
from kvferry.simulate.fleet import Shape
from kvferry.simulate.machine import Machine
from kvferry.simulate.memory import Memory
from kvferry.simulate.peer_policies import RoundRobin
from kvferry.simulate.trace_request import TraceRequest
from kvferry.simulate.trace_writer import TraceParams, hashes_of
from kvferry.simulate.workloads import WORKLOADS
from kvferry.simulate.world import Loss, World

MACHINE = Machine(
    prefill_tokens_per_s=1000, attention_len=0, step_s=0.01, stream_s=0.01, context_s=0.0, ship_bytes_per_s=1e12,
    block_size=16, block_bytes=1024, blocks=256,
)  # fmt: skip


def ask(number: int, at: float, prompt: int, output: int, name: str = "", after: int = -1) -> TraceRequest:
    hashes = hashes_of([(name or f"p{number}", prompt), (f"o{number}", output)], MACHINE.block_size)
    return TraceRequest(number, at, prompt, output, hashes, after)


def played(shape: Shape, trace: list[TraceRequest], policy: str = "kvferry", losses: tuple[Loss, ...] = ()) -> World:
    world = World(shape, POLICIES[policy](), trace, losses)
    asyncio.run(world.play())
    for node in world.fleet.nodes.values():
        node.memory.check_integrity()
        assert node.memory.holds.num_held == 0
        assert not node.streams
        assert not len(node.prompts)
    return world


def test_a_lone_request_takes_what_its_machine_says() -> None:
    world = played(Shape(1, 1, MACHINE), [ask(0, 1.0, 500, 11)])
    (run,) = world.runs
    assert run.ttft_s == pytest.approx(0.5)
    assert run.last_s - run.first_s == pytest.approx(10 * 0.02, abs=0.01)
    assert run.cached_len == 0


def test_prompts_wait_for_each_other_and_the_shortest_goes_first() -> None:
    trace = [ask(0, 0.0, 500, 2), ask(1, 0.01, 500, 2), ask(2, 0.02, 100, 2)]
    world = played(Shape(1, 1, MACHINE), trace, "round-robin")
    first, second, short = world.runs
    assert short.ttft_s == pytest.approx(0.1, abs=0.01)
    assert first.ttft_s == pytest.approx(0.6, abs=0.01)
    assert second.ttft_s == pytest.approx(1.09, abs=0.01)


def test_streams_stretch_each_others_steps() -> None:
    alone = played(Shape(0, 1, MACHINE), [ask(0, 0.0, 16, 101)]).runs[0]
    beside = played(Shape(0, 1, MACHINE), [ask(0, 0.0, 16, 101), ask(1, 0.0, 16, 101)]).runs[0]
    assert alone.itl_s == pytest.approx(0.02, rel=0.05)
    assert beside.itl_s == pytest.approx(0.03, rel=0.05)


def test_prompts_and_streams_on_the_same_cores_take_turns() -> None:
    """A stream's steps of 0.02 s take four times as long while a prompt is computed, and that takes 4/3 as long."""
    shared = replace(MACHINE, beside=0.75)
    trace = [ask(0, 0.0, 100, 1001), ask(1, 1.0, 900, 2)]
    stream, prompt = played(Shape(1, 1, shared), trace, "round-robin").runs
    assert prompt.ttft_s == pytest.approx(1.2, abs=0.01)
    lost_s = 1.2 * 0.75 + 0.01
    assert stream.last_s - stream.first_s == pytest.approx(1000 * 0.02 + lost_s, abs=0.03)
    apart = played(Shape(1, 1, MACHINE), trace, "round-robin").runs
    assert apart[1].ttft_s == pytest.approx(0.9, abs=0.01)


def test_each_prefill_node_has_one_machine_and_each_machine_its_own_decode_nodes() -> None:
    """The prompt of the machine on which nothing runs is not slower for the stream of another one."""
    shared = replace(MACHINE, beside=0.5)
    trace = [ask(0, 0.0, 100, 1001), ask(1, 1.0, 500, 2), ask(2, 2.5, 500, 2)]
    runs = played(Shape(2, 2, shared), trace, "round-robin").runs
    assert runs[1].prefill is not runs[0].prefill
    assert runs[1].ttft_s == pytest.approx(0.5, abs=0.02)
    assert runs[2].prefill is runs[0].prefill
    assert runs[2].ttft_s == pytest.approx(1.0, abs=0.02)


def test_what_a_request_costs_besides_comes_before_its_first_token() -> None:
    world = played(Shape(1, 1, replace(MACHINE, overhead_s=0.3)), [ask(0, 1.0, 500, 11)])
    assert world.runs[0].ttft_s == pytest.approx(0.8)


def test_what_was_computed_is_reused() -> None:
    trace = [ask(0, 0.0, 320, 2, "same"), ask(1, 5.0, 320, 2, "same")]
    world = played(Shape(2, 2, MACHINE), trace)
    assert [run.cached_len for run in world.runs] == [0, 304]


def test_who_waited_behind_a_prompt_finds_its_blocks() -> None:
    trace = [ask(0, 0.0, 320, 2, "same"), ask(1, 0.01, 320, 2, "same")]
    world = played(Shape(1, 1, MACHINE), trace, "round-robin")
    assert [run.cached_len for run in world.runs] == [0, 304]


def test_a_small_pool_makes_requests_wait_and_all_end() -> None:
    trace = [ask(number, 0.01 * number, 300, 200) for number in range(30)]
    world = played(Shape(1, 1, replace(MACHINE, blocks=40)), trace)
    assert len(world.runs) == 30
    assert not any(run.failed for run in world.runs)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lost_node_takes_nobody_with_it(policy: str) -> None:
    trace = [ask(number, 0.05 * number, 200, 60, f"p{number % 7}") for number in range(80)]
    losses = (Loss(1.0, "prefill", 0.0, 1.0), Loss(2.0, "decode", 0.5, 1.0), Loss(2.5, "prefill", 0.9, 1.0))
    world = played(Shape(2, 2, MACHINE), trace, policy, losses)
    assert len(world.runs) == 80
    assert all(run.delivered == run.ask.output_len for run in world.runs)
    assert any(run.attempt for run in world.runs)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_every_order_of_eviction_keeps_the_books(eviction: str) -> None:
    trace = WORKLOADS["chat"](TraceParams(100, 40, 3, 16))
    machine = replace(MACHINE, prefill_tokens_per_s=20_000, blocks=3000)
    world = played(Shape(2, 2, machine, eviction=eviction), trace)
    assert sum(node.memory.evicted_total for node in world.fleet.nodes.values()) > 100


def test_a_parent_cheaper_than_its_children_stays_until_they_left() -> None:
    """Cost grows with position: ranked by it, a chain's first block would come before its tail."""
    pool = Memory(4, "gdsf-cost")
    chain = [bytes([number]) * 16 for number in range(4)]
    pool.take("a", chain, 4)
    pool.fill("a", chain)
    pool.release_owner("a")
    for left in (3, 2, 1):
        pool.take("b", (), 4 - left)
        pool.release_owner("b")
        assert pool.found(chain) == left
    pool.check_integrity()


def test_a_client_that_waits_asks_again_after_its_answer() -> None:
    world = played(Shape(1, 1, MACHINE), [ask(0, 0.0, 100, 10), ask(1, 2.0, 100, 10, after=0)])
    first, second = world.runs
    assert second.arrived == pytest.approx(first.last_s + 2.0)


def test_a_machine_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"blocks must be from 1 to 1e\+07, not 0"):
        Machine(blocks=0)
    with pytest.raises(ConfigError, match=r"beside must be from 0\.01 to 1, not 2"):
        Machine(beside=2.0)
    with pytest.raises(ConfigError, match="step_s"):
        Machine(step_s=float("nan"))
    with pytest.raises(ConfigError, match="decode"):
        Shape(1, 0)


def test_round_robin_takes_turns() -> None:
    trace = [ask(number, 1.0 * number, 100, 2) for number in range(8)]
    world = World(Shape(2, 2, MACHINE), RoundRobin(), trace)
    asyncio.run(world.play())
    counts = [node.computed for node in world.fleet.nodes.values() if node.role == "prefill"]
    assert counts == [400, 400]

"""A decode node drains: the router has its streams go on elsewhere, and no token is lost, repeated or changed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

import kvferry.router.dispatch.migration
import kvferry.router.dispatch.migration_attempt
from kvferry.protocol.errors import BlocksCorrupt, NodeLost, TransferFailed
from kvferry.protocol.messages import AttemptFailed, MoveRequest, PrefillRequest, StepFrame
from kvferry.router.dispatch.migration_attempt import MigrationAttempt
from tests.fake_workers import (
    PROMPT,
    Bench,
    FakeWorker,
    collect,
    decode,
    expected,
    first_token,
    ids,
    prefill,
    ship_done,
)
from tests.waiting import until

MOST = 120


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvferry.router.dispatch.migration, "PAUSE_S", 0.05)


async def drain(bench: Bench, worker: FakeWorker) -> None:
    """As the node's lease tells it."""
    worker.lease = replace(worker.lease, state="draining")
    await bench.store.announce(worker.lease)


async def begun(bench: Bench, **spec: Any) -> tuple[FakeWorker, FakeWorker, asyncio.Task[list[int]]]:
    """A stream under way: the node it is at, the other one, and all its tokens once it has ended."""

    async def tokens() -> list[int]:
        return ids(await collect(dispatch))

    dispatch = bench.start(MOST, **spec)
    task = asyncio.create_task(tokens())
    await until(lambda: any(worker.running and worker._deltas > 3 for worker in bench.workers.values()))
    at = next(worker for worker in bench.workers.values() if worker.running)
    (other,) = (w for w in bench.workers.values() if w.role == "decode" and w is not at)
    return at, other, task


def workers(**fields: object) -> list[FakeWorker]:
    return [prefill(), decode("d1", **fields), decode("d2", **fields)]


async def test_a_stream_goes_on_at_another_node_without_a_prefill() -> None:
    async with Bench(workers()) as bench:
        at, other, tokens = await begun(bench)
        await drain(bench, at)
        assert await tokens == expected(PROMPT, MOST)
        assert bench.retries() == {"move": 1}
        assert [(move.attempt, move.later) for move in at.moves] == [(0, 1)]
        assert [job.attempt for job in other.jobs] == [1]
        assert not at.running
        assert len(bench["p1"].prefills) == 1


async def test_what_the_new_node_makes_waits_for_what_the_old_one_made() -> None:
    """The word that the stream moved comes late: its last tokens may be behind it."""
    async with Bench(workers(move_lag_s=0.1)) as bench:
        at, _, tokens = await begun(bench)
        await drain(bench, at)
        assert await tokens == expected(PROMPT, MOST)


async def test_a_move_that_fails_is_tried_again_and_the_stream_runs_on_meanwhile() -> None:
    async with Bench(workers()) as bench:
        at, other, tokens = await begun(bench)
        at.move_refusals = [TransferFailed("cut"), TransferFailed("cut")]
        await drain(bench, at)
        assert await tokens == expected(PROMPT, MOST)
        assert [move.later for move in at.moves] == [1, 2, 3]
        assert [job.attempt for job in other.jobs] == [3]
        await until(lambda: [cancel.attempt for cancel in other.cancels] == [1, 2])


async def test_a_stream_that_moved_leaves_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    gc.freeze()  # what the process held before is not looked at again and again below
    async with Bench(workers()) as bench:
        at, _, tokens = await begun(bench)
        await drain(bench, at)
        gc.collect()
        gc.disable()
        try:
            await tokens
            del tokens
            await until(lambda: not any(type(each) is MigrationAttempt for each in gc.get_objects()))
        finally:
            gc.enable()
        assert bench.retries() == {"move": 1}


async def test_the_last_node_runs_on_until_there_is_another() -> None:
    async with Bench([prefill(), decode("d1")]) as bench:
        task = asyncio.create_task(collect(bench.start(MOST)))
        await until(lambda: bench["d1"]._deltas > 3)
        await drain(bench, bench["d1"])
        await asyncio.sleep(0.1)
        assert bench["d1"].running
        await bench.add(decode("d2"))
        assert ids(await task) == expected(PROMPT, MOST)
        assert bench["d2"].jobs


@pytest.mark.parametrize("who", ["the node that drains", "the node that takes over"])
async def test_a_node_dies_in_the_middle_of_a_move(who: str) -> None:
    """The stream is recovered as ever, at one that is left."""
    async with Bench(workers(move_lag_s=0.15)) as bench:
        at, _, tokens = await begun(bench)
        await bench.add(decode("d3"))
        await drain(bench, at)
        await until(lambda: at.moves)
        target = bench.workers[at.moves[0].target.node_id]
        await until(lambda: target._deltas > 3)
        (at if who == "the node that drains" else target).crash()
        assert await tokens == expected(PROMPT, MOST)


async def test_a_move_that_was_given_up_comes_about_after_all() -> None:
    """The router had lost the first successor's node; what the second one waits for never comes."""
    async with Bench(workers(move_wait_s=0.1)) as bench:
        at, _, tokens = await begun(bench)
        await bench.add(decode("d3"))
        await drain(bench, at)
        await until(lambda: at.moves)
        target = bench.workers[at.moves[0].target.node_id]
        bench.nodes.entries[(target.node_id, 1)].broken(NodeLost("cut"))
        await until(lambda: len(at.moves) > 1)
        async with asyncio.timeout(3):
            assert await tokens == expected(PROMPT, MOST)
        assert at.moves[1].target.node_id != target.node_id


async def test_a_move_that_was_given_up_comes_about_and_the_call_for_the_next_one_breaks() -> None:
    """The stream went where nobody listens: who waits for the second successor is told at once that it is not its
    own."""
    async with Bench(workers(move_wait_s=0.3)) as bench:
        at, _, tokens = await begun(bench)
        await bench.add(decode("d3"))
        await drain(bench, at)
        await until(lambda: at.moves)
        at.move_wait_s = 0.6
        target = bench.workers[at.moves[0].target.node_id]
        bench.nodes.entries[(target.node_id, 1)].broken(NodeLost("cut"))
        await until(lambda: len(at.moves) > 1)
        cut_moves(at)
        await until(lambda: [job.attempt for job in target.jobs] == [1])
        at.move_refusals = [TransferFailed("it does not stream here")]
        async with asyncio.timeout(2):
            assert await tokens == expected(PROMPT, MOST)
        assert bench.retries() == {"move": 2, "another_decode": 1}


async def test_a_node_that_takes_over_drains_too() -> None:
    async with Bench(workers(move_lag_s=0.1)) as bench:
        at, other, tokens = await begun(bench)
        await drain(bench, at)
        await until(lambda: other.running)
        await drain(bench, other)
        await bench.add(decode("d3"))
        assert await tokens == expected(PROMPT, MOST)
        assert [move.target.node_id for move in other.moves] == ["d3"]
        assert bench.retries() == {"move": 2}


async def test_blocks_that_come_corrupt_in_moves_end_in_quarantine() -> None:
    """The stream runs on where it is until there is another node; then it goes there."""
    async with Bench(workers(step_s=0.02)) as bench:
        at, other, tokens = await begun(bench)
        at.move_refusals = [BlocksCorrupt("other bytes") for _ in range(3)]
        await drain(bench, at)
        pair = (at.node_id, 1), (other.node_id, 1)
        await until(lambda: pair in bench.nodes.breakers.open().pairs)
        assert bench.nodes.breakers.quarantine
        assert len(at.moves) == 3
        await asyncio.sleep(0.3)
        assert len(at.moves) == 3
        assert at.running
        await bench.add(decode("d3"))
        assert await tokens == expected(PROMPT, MOST)
        assert [move.target.node_id for move in at.moves] == [other.node_id] * 3 + ["d3"]


def cut_moves(worker: FakeWorker) -> None:
    """The connections break on which the router waits for them."""
    for connection in list(worker._server.server_state.connections):
        if connection.scope and connection.scope["path"] == "/attempts/move":  # type: ignore[union-attr]
            connection.transport.abort()  # type: ignore[union-attr]


async def test_the_call_breaks_while_the_move_goes_on() -> None:
    async with Bench(workers(move_wait_s=0.1)) as bench:
        at, other, tokens = await begun(bench)
        await drain(bench, at)
        await until(lambda: at.moves)
        cut_moves(at)
        assert await tokens == expected(PROMPT, MOST)
        assert [move.later for move in at.moves] == [1]
        assert [job.attempt for job in other.jobs] == [1]
        assert not other.cancels
        assert bench.retries() == {"move": 1}


async def test_the_call_breaks_and_nothing_is_heard_of_the_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again, at the same node, which did nothing wrong."""
    monkeypatch.setattr(kvferry.router.dispatch.migration_attempt, "OUTCOME_WAIT_S", 0.05)
    async with Bench(workers(move_wait_s=2.0)) as bench:
        at, other, tokens = await begun(bench)
        await drain(bench, at)
        await until(lambda: at.moves)
        at.move_wait_s = 0.0
        cut_moves(at)
        assert await tokens == expected(PROMPT, MOST)
        assert [(move.later, move.target.node_id) for move in at.moves] == [(1, other.node_id), (2, other.node_id)]
        assert bench.retries() == {"move": 2}


async def test_a_client_leaves_in_the_middle_of_a_move() -> None:
    async with Bench(workers(move_lag_s=0.15)) as bench:
        at, other, tokens = await begun(bench)
        await drain(bench, at)
        await until(lambda: other._deltas > 3)
        tokens.cancel()
        await asyncio.gather(tokens, return_exceptions=True)
        await until(lambda: not at.running and not other.running)
        assert other.cancels[-1].attempt == 1


async def test_a_stream_ends_before_it_moves() -> None:
    async with Bench(workers(move_wait_s=3.0)) as bench:
        at, other, tokens = await begun(bench)
        await drain(bench, at)
        assert await tokens == expected(PROMPT, MOST)
        await until(lambda: other.cancels)
        assert not other.running


async def test_a_stream_is_said_to_have_moved_although_nobody_asked() -> None:
    """No node of ours says so: it is a failure like any other."""
    async with Bench(workers()) as bench:
        at, _, tokens = await begun(bench)
        (job,) = at.jobs
        at._running[job.request_id].cancel()
        at._queues[job.router_id].put_nowait(StepFrame(failed=(AttemptFailed(job.request_id, 0, "moved", "so"),)))
        assert await tokens == expected(PROMPT, MOST)
        assert bench.retries() == {"another_decode": 1}


async def test_all_streams_of_a_node_leave_it() -> None:
    async with Bench(workers()) as bench:
        dispatches = [asyncio.create_task(collect(bench.start(MOST))) for _ in range(8)]
        await until(lambda: bench["d1"].running + bench["d2"].running == 8)
        await drain(bench, bench["d1"])
        for dispatch in dispatches:
            assert ids(await dispatch) == expected(PROMPT, MOST)
        assert bench.retries() == {"move": len(bench["d1"].moves)}


def test_a_move_request_is_a_message_of_its_own() -> None:
    assert MoveRequest.__dataclass_fields__.keys() == {"request_id", "attempt", "later", "target"}


async def test_no_stream_moves_to_a_node_that_cannot_read_its_blocks() -> None:
    """A rollout that changes the fingerprint: what runs ends where it is, and what is new begins at the new node."""
    new = decode("d2", changes={"fingerprint": "new"})
    async with Bench([prefill(), decode("d1", step_s=0.01), new]) as bench:
        at, other, tokens = await begun(bench)
        assert other is new
        await drain(bench, at)
        await until(lambda: [group.fingerprint for group in bench.cluster.model.usable] == ["new"])
        assert ids(await collect(bench.start(8))) == expected(PROMPT, 8)
        assert new.jobs
        assert await tokens == expected(PROMPT, MOST)
        assert bench.retries() == {}
        assert not at.moves


async def test_a_node_that_stays_after_all_keeps_its_streams() -> None:
    """As one does that was to change its role, and could not."""
    async with Bench(workers()) as bench:
        at, _, tokens = await begun(bench)
        at.move_refusals = [TransferFailed("cut")] * MOST
        await drain(bench, at)
        await until(lambda: len(at.moves) > 1)
        at.lease = replace(at.lease, state="ready")
        await bench.store.announce(at.lease)
        await until(lambda: not any(entry.drains for entry in bench.nodes.entries.values()))
        await asyncio.sleep(0.1)
        moves, at.move_refusals = len(at.moves), []
        assert await tokens == expected(PROMPT, MOST)
        assert len(at.moves) == moves


async def test_a_stream_moves_only_after_its_first_token() -> None:
    """It comes from the prefill node, on another connection: a stream that had moved before waited for it for ever."""
    gate = asyncio.Event()

    async def late(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        first = first_token(request.job)
        assert request.target
        worker.peers[request.target.node_id].decode(request.job, first.delta.index + 1)
        await gate.wait()
        yield first
        yield ship_done(request.job)

    async with Bench([prefill(prefill_script=late), decode("d1"), decode("d2")]) as bench:
        at, other, tokens = await begun(bench)
        await drain(bench, at)
        await until(lambda: bench.nodes.entries[at.node_id, 1].drains)
        await asyncio.sleep(0.1)
        early = len(at.moves)
        gate.set()
        async with asyncio.timeout(10.0):
            assert await tokens == expected(PROMPT, MOST)
        assert (early, len(at.moves), len(other.jobs)) == (0, 1, 1)


async def test_a_stream_that_was_not_moved_in_time_is_recovered_elsewhere_and_nobody_is_suspected() -> None:
    """The draining node says so before it ends; its end alone would look like a death."""
    async with Bench(workers()) as bench:
        at, other, tokens = await begun(bench)
        job = at.jobs[0]
        at._running[job.request_id].cancel()
        ended = AttemptFailed(job.request_id, job.attempt, "draining", "the node ends")
        at._queues[job.router_id].put_nowait(StepFrame(failed=(ended,)))
        assert await tokens == expected(PROMPT, MOST)
        assert bench.retries() == {"drain_timeout": 1}
        assert len(other.jobs) == 1
        assert not bench.cluster.deaths.any
        assert not bench.nodes.breakers.open().nodes


async def test_a_move_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node has it happen after all, for a successor that nobody waits for any more."""
    monkeypatch.setattr(kvferry.router.dispatch.migration_attempt, "MAX_MOVE_S", 0.1)
    async with Bench(workers(move_wait_s=0.25)) as bench:
        at, _, tokens = await begun(bench)
        await drain(bench, at)
        assert await tokens == expected(PROMPT, MOST)
        assert len(at.moves) > 1

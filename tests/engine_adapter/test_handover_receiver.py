"""Handovers that a decode node refuses, and what it makes of those that it accepts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.engine_adapter.engine import EngineDelta
from kvferry.engine_adapter.handover_receiver import FRESH, Handovers
from kvferry.engine_adapter.transfer import COMPARED_TOKENS, Transfer
from kvferry.protocol.errors import BlocksCorrupt, Fenced, InvalidRequest, KvferryError, StepFailed, TransferFailed
from kvferry.protocol.handover_messages import Handover, HandoverOffer
from kvferry.protocol.messages import Job
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import WireError, pack, unpack
from kvferry.protocol.work import Embed, Generate
from tests.waiting import until

SENDER, OWN, LEASE_S = ("p", 3), ("d", 7), 10.0
JOB = Job("r", 1, (1, 2, 3), 3, Generate(SamplingParams(temperature=0.0, max_tokens=8)), "router")


class Node:
    """A decode node's handovers on a clock of the test. started: jobs and transfers that reached the attempts."""

    def __init__(self, exact: bool = True) -> None:
        self.now, self.started, self.refused = 1000.0, list[tuple[Job, Transfer]](), 0
        self.handovers = Handovers(OWN, self._start, lambda job: exact, self._refuse, lambda: self.now)

    def _start(self, job: Job, transfer: Transfer) -> None:
        self.started.append((job, transfer))

    def _refuse(self) -> None:
        self.refused += 1

    def handover(self, job: Job = JOB, age_s: float = 0.001, **more: Any) -> Handover:
        """A handover with a ticket of now."""
        ticket = self.handovers.offer(HandoverOffer(job.request_id, job.attempt, SENDER, OWN[1])).ticket
        told = {"reference": f"blocks of {ticket}", "length": len(job.token_ids), **more}
        return Handover(job, ticket, SENDER, OWN[1], first_token=50, age_s=age_s, lease_s=LEASE_S, **told)

    async def accepted(self, handover: Handover) -> Transfer:
        task = asyncio.create_task(self.handovers.take(handover))
        await until(lambda: self.started or task.done())
        if task.done():
            await task
        task.cancel()
        return self.started[-1][1]


async def refused(node: Node, handover: Handover, error: type[KvferryError], told: str) -> None:
    with pytest.raises(error, match=told):
        await node.handovers.take(handover)
    assert (node.started, node.refused) == ([], 1)


async def test_an_accepted_handover_is_answered_when_the_first_token_has_come() -> None:
    node = Node()
    handover = node.handover()
    task = asyncio.create_task(node.handovers.take(handover))
    await until(lambda: node.started)
    (job, transfer), *_ = node.started
    assert (job, transfer.reference, transfer.length, transfer.sender) == (JOB, handover.reference, 3, SENDER)
    assert transfer.continuing_job(JOB).token_ids == (1, 2, 3, 50)
    assert not task.done()
    transfer.check(EngineDelta((50,)))
    await task


async def test_an_attempt_that_fails_before_is_told_to_the_prefill_node() -> None:
    node = Node()
    task = asyncio.create_task(node.handovers.take(node.handover()))
    await until(lambda: node.started)
    node.started[0][1].fail(StepFailed("no"))
    with pytest.raises(StepFailed):
        await task


async def test_a_handover_that_is_sent_again_is_refused() -> None:
    node = Node()
    handover = node.handover()
    await node.accepted(handover)
    node.started.clear()
    await refused(node, handover, TransferFailed, "ticket")


async def test_a_reference_that_was_used_is_refused_with_a_new_ticket_too() -> None:
    node = Node()
    await node.accepted(node.handover(reference="blocks"))
    node.started.clear()
    await refused(node, node.handover(replace(JOB, request_id="other"), reference="blocks"), TransferFailed, "used")


@pytest.mark.parametrize("age_s", [FRESH * LEASE_S, LEASE_S, 1e9, float("nan"), float("inf"), -1.0])
async def test_an_old_reference_is_refused(age_s: float) -> None:
    node = Node()
    await refused(node, node.handover(age_s=age_s), TransferFailed, "old")


async def test_time_that_passes_here_behind_the_ticket_counts() -> None:
    """The handover lay in a socket while this process was suspended: the sender could not know."""
    node = Node()
    handover = node.handover(age_s=0.0)
    node.now += FRESH * LEASE_S
    await refused(node, handover, TransferFailed, "old")


async def test_a_ticket_that_came_long_before_the_prefill_ended_is_no_age() -> None:
    node = Node()
    handover = node.handover(age_s=-60.0)
    node.now += 60.5
    transfer = await node.accepted(handover)
    assert transfer.ends_at == pytest.approx(node.now - 0.5 + LEASE_S)


async def test_another_epoch_of_this_node_is_fenced() -> None:
    node = Node()
    with pytest.raises(Fenced):
        node.handovers.offer(HandoverOffer("r", 1, SENDER, OWN[1] - 1))
    await refused(node, replace(node.handover(), decode_epoch=OWN[1] - 1), Fenced, "epoch 7")


@pytest.mark.parametrize(
    "changes",
    [
        {"ticket": "0" * 32},
        {"sender": ("p", 4)},
        {"sender": ("q", 3)},
        {"job": replace(JOB, attempt=2)},
        {"job": replace(JOB, request_id="s")},
    ],
)
async def test_a_ticket_is_for_one_attempt_of_one_prefill_process(changes: dict[str, Any]) -> None:
    node = Node()
    await refused(node, replace(node.handover(), **changes), TransferFailed, "ticket")


@pytest.mark.parametrize(("length", "job"), [(2, JOB), (4, JOB), (3, replace(JOB, work=Embed()))])
async def test_blocks_of_other_tokens_than_the_job_s_are_refused(length: int, job: Job) -> None:
    node = Node()
    await refused(node, node.handover(job, length=length), InvalidRequest, "tokens")


async def test_a_replay_must_begin_with_the_delivered_token() -> None:
    node, job = Node(), replace(JOB, token_ids=(1, 2, 3, 50, 51))
    transfer = await node.accepted(node.handover(job, length=3))
    assert transfer.continuing_job(job) == job
    node.started.clear()
    await refused(node, node.handover(replace(job, token_ids=(1, 2, 3, 49, 51)), length=3), TransferFailed, "delivered")


@pytest.mark.parametrize(("exact", "error"), [(True, BlocksCorrupt), (False, TransferFailed)])
async def test_another_first_token_means_wrong_blocks_where_engines_cannot_differ(
    exact: bool, error: type[KvferryError]
) -> None:
    node = Node(exact)
    transfer = await node.accepted(node.handover())
    with pytest.raises(error) as raised:
        transfer.check(EngineDelta((51,)))
    assert type(raised.value) is error
    assert not transfer.landed.done()


async def test_an_output_that_ends_without_the_first_token_differs() -> None:
    node = Node()
    transfer = await node.accepted(node.handover())
    with pytest.raises(BlocksCorrupt):
        transfer.check(EngineDelta((), None, "stop"))


async def test_a_first_token_behind_the_lease_s_end_is_not_believed() -> None:
    """The engine may have fetched the blocks when they held something else already."""
    node = Node()
    transfer = await node.accepted(node.handover())
    node.now = transfer.ends_at
    with pytest.raises(TransferFailed, match="lease"):
        transfer.check(EngineDelta((50,)))


async def test_later_tokens_may_come_at_any_time_and_the_first_few_are_kept() -> None:
    node = Node()
    transfer = await node.accepted(node.handover())
    transfer.check(EngineDelta((50,)))
    node.now = transfer.ends_at + 1
    transfer.check(EngineDelta(tuple(range(60, 80))))
    assert transfer.tokens == [50, *range(60, 60 + COMPARED_TOKENS - 1)]


async def test_tickets_and_references_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.engine_adapter.handover_receiver.MAX_TICKETS", 2)
    node = Node()
    first = node.handover()
    for _ in range(2):
        node.handover()
    await refused(node, first, TransferFailed, "ticket")


async def test_messages_of_the_wrong_type_are_not_read() -> None:
    handover = Node().handover()
    assert unpack(pack(handover)) == handover
    with pytest.raises(WireError):
        unpack(pack(replace(handover, age_s="soon")))  # type: ignore[arg-type]

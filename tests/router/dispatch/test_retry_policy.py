"""The order of retries."""

from __future__ import annotations

import pytest

from kvferry.placement.types import Placement
from kvferry.protocol.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    GrantRefused,
    Incompatible,
    KvferryError,
    NodeLost,
    Overloaded,
    StepFailed,
    TransferFailed,
)
from kvferry.protocol.lease import NodeLease
from kvferry.router.dispatch.failures import Failure, nodes_at_fault
from kvferry.router.dispatch.retry_policy import MAX_FAILURES, RetryPolicy
from tests.fake_workers import lease_of

P1, P2 = lease_of("p1", "prefill"), lease_of("p2", "prefill")
D1, D2 = lease_of("d1", "decode"), lease_of("d2", "decode")
BOTH = {("p1", 1), ("p2", 1)}


def test_the_whole_ladder() -> None:
    retry_policy = RetryPolicy()
    assert retry_policy.next_step(Failure(0, KvferryError("x"), (P1,)), 0, BOTH) == "same_prefill"
    assert retry_policy.pinned == ("p1", 1)
    assert retry_policy.next_step(Failure(1, NodeLost("x"), (P1,)), 0, BOTH) == "another_prefill"
    assert retry_policy.pinned is None
    assert retry_policy.next_step(Failure(2, NodeLost("x"), (P2,)), 0, BOTH) == "local_prefill"
    assert retry_policy.local_only
    assert retry_policy.next_step(Failure(3, NodeLost("x"), (D1,)), 0, BOTH) == "another_decode"
    assert retry_policy.excluded == {("p1", 1), ("p2", 1), ("d1", 1)}


def test_not_the_same_prefill_once_tokens_are_out_or_it_is_gone() -> None:
    assert RetryPolicy().next_step(Failure(0, NodeLost("x"), (P1,)), 1, BOTH) == "another_prefill"
    assert RetryPolicy().next_step(Failure(0, NodeLost("x"), (P1,)), 0, {("p2", 1)}) == "another_prefill"
    assert RetryPolicy().next_step(Failure(0, NodeLost("x"), (P1,)), 0, ()) == "local_prefill"


@pytest.mark.parametrize("error", [ContextLengthExceeded("x"), DeadlineExceeded("x")])
def test_hopeless_errors_pass(error: KvferryError) -> None:
    with pytest.raises(type(error)):
        RetryPolicy().next_step(Failure(0, error, (P1,)), 0, BOTH)


def test_what_breaks_the_steps_of_two_nodes_is_not_tried_at_a_third() -> None:
    retry_policy = RetryPolicy()
    assert retry_policy.next_step(Failure(0, StepFailed("x"), (P1,)), 0, BOTH) == "another_prefill"
    with pytest.raises(StepFailed):
        retry_policy.next_step(Failure(1, StepFailed("x"), (P2,)), 0, BOTH)


def test_failures_are_bounded_and_refusals_are_not_failures() -> None:
    retry_policy = RetryPolicy()
    for _ in range(3 * MAX_FAILURES):
        assert retry_policy.next_step(Failure(0, GrantRefused("x"), (D1,)), 0, ()) == "wait_for_room"
    for _ in range(MAX_FAILURES - 1):
        retry_policy.next_step(Failure(0, NodeLost("x"), (D1,)), 0, ())
    with pytest.raises(NodeLost):
        retry_policy.next_step(Failure(0, NodeLost("x"), (D1,)), 0, ())


@pytest.mark.parametrize(
    ("error", "reporter", "faulty"),
    [
        (GrantRefused("x"), P1, (D1,)),
        (Overloaded("x"), P1, (P1,)),
        (KvferryError("x"), D1, (D1,)),
        (TransferFailed("x"), P1, (P1, D1)),
        (NodeLost("x"), P1, (P1, D1)),
        (Incompatible("x"), P1, (P1, D1)),
        (TransferFailed("x"), D1, (P1, D1)),
        (NodeLost("x"), D1, (P1, D1)),
    ],
)
def test_blame(error: KvferryError, reporter: NodeLease, faulty: tuple[NodeLease, ...]) -> None:
    assert nodes_at_fault(error, reporter, Placement(P1, D1, 0, 0.0, 0.0)) == faulty


def test_nobody_else_is_to_blame_without_a_pair_or_once_it_decodes() -> None:
    assert nodes_at_fault(NodeLost("x"), D1, Placement(None, D1, 0, 0.0, 0.0)) == (D1,)
    assert nodes_at_fault(NodeLost("x"), D1, Placement(P1, D1, 0, 0.0, 0.0), decoding=True) == (D1,)


def test_a_pair_that_fails_is_avoided_and_its_nodes_are_not() -> None:
    retry_policy = RetryPolicy()
    assert retry_policy.next_step(Failure(0, TransferFailed("x"), (P1, D1)), 0, BOTH) == "another_pair"
    assert retry_policy.broken == {(("p1", 1), ("d1", 1))}
    assert not retry_policy.excluded
    assert retry_policy.next_step(Failure(1, TransferFailed("x"), (P2, D1)), 0, BOTH) == "another_pair"
    assert retry_policy.next_step(Failure(2, TransferFailed("x"), (P1, D2)), 0, BOTH) == "local_prefill"
    assert retry_policy.local_only
    retry_policy.clear_avoided()
    assert not retry_policy.broken

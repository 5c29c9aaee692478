"""The router that asks nodes to change their roles: when, whom, and what it does about a refusal."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.protocol.errors import NodeLost, RoleChangeRefused
from kvferry.protocol.lease import NodeLease
from kvferry.router.role_rebalancing import HOLD_S, RoleRebalancer

REST_S = 30.0


def node(name: str, role: str, fingerprint: str = "f", **changes: Any) -> NodeLease:
    return NodeLease(
        name, role, 1, "ready", "http://h:1", "h:2", fingerprint, "m", 64, 16, 1024, elastic=True, **changes
    )


class Asked:
    """A model's pool, a clock, and whom the router asked."""

    def __init__(self, refuse: Exception | None = None) -> None:
        self.leases = [node("p0", "prefill"), node("p1", "prefill"), node("d0", "decode")]
        self.waits_s, self.seats, self.now = 0.0, 0.0, 0.0
        self.told: list[tuple[str, str, float]] = []
        self._refuse = refuse
        cluster = SimpleNamespace(leases=lambda: self.leases)
        backlog = SimpleNamespace(prefill_s=lambda: self.waits_s, decode_nodes=lambda: self.seats)
        pool: Any = SimpleNamespace(name="m", cluster=cluster, backlog=backlog)
        self.balance = RoleRebalancer([pool], self.ask, REST_S, lambda: self.now)

    async def ask(self, lease: NodeLease, role: str, rest_s: float) -> None:
        self.told.append((lease.node_id, role, rest_s))
        if self._refuse:
            raise self._refuse

    async def check(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            each()
            await self.balance.check()


async def test_what_waits_in_the_router_counts_and_must_last() -> None:
    asked = Asked()
    asked.seats = 1.0
    await asked.check(HOLD_S)
    assert asked.told == []
    await asked.check(0.5)
    assert asked.told == [("p0", "decode", REST_S)]


async def test_a_burst_that_comes_and_goes_changes_nothing() -> None:
    asked = Asked()

    def bursts() -> None:
        asked.seats = 1.0 if asked.now % 3 else 0.0

    await asked.check(30.0, bursts)
    assert asked.told == []


async def test_prompts_that_wait_bring_a_decode_node_to_prefill() -> None:
    asked = Asked()
    asked.leases = [node("p0", "prefill"), node("d0", "decode", pressure=0.3), node("d1", "decode", pressure=0.2)]
    asked.waits_s = 5.0
    await asked.check(HOLD_S + 0.5)
    assert asked.told == [("d1", "prefill", REST_S)]


@pytest.mark.parametrize("error", [RoleChangeRefused("it is the last one"), NodeLost("it is gone")])
async def test_who_refuses_is_asked_again_after_as_long(error: Exception) -> None:
    asked = Asked(error)
    asked.seats = 1.0
    await asked.check(2 * HOLD_S + 1.5)
    assert len(asked.told) == 2


async def test_a_role_keeps_a_node_of_each_fingerprint() -> None:
    asked = Asked()
    asked.leases = [node("p0", "prefill"), node("p1", "prefill", "other"), node("d0", "decode")]
    asked.seats = 1.0
    await asked.check(HOLD_S + 1.0)
    assert asked.told == []


async def test_each_fingerprint_balances_its_own_roles() -> None:
    """The nodes of the other one would be too few for what waits, and none of them can help."""
    asked = Asked()
    asked.leases = [node("d0", "decode"), node("p1", "prefill", "other", leaving=True), node("d1", "decode", "other")]
    asked.leases += [node("q0", "prefill", "third"), node("q1", "prefill", "third"), node("d2", "decode", "third")]
    asked.seats = 2.0
    await asked.check(HOLD_S + 0.5)
    assert asked.told == [("q0", "decode", REST_S)]


async def test_a_pool_without_nodes_asks_nobody() -> None:
    asked = Asked()
    asked.leases = []
    asked.seats = 1.0
    await asked.check(HOLD_S + 1.0)
    assert asked.told == []

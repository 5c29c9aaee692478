"""Role changes of an adapter: when it changes, what keeps it in its role, and what becomes of a change that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.engine_adapter import engine_watch, role_changes
from kvferry.engine_adapter.engine import ElasticEngine
from kvferry.engine_adapter.engine_watch import EngineWatch
from kvferry.engine_adapter.engines import sglang_roles
from kvferry.engine_adapter.engines.sglang import SglangEngine
from kvferry.engine_adapter.role_changes import ChangingNode, RoleChanges
from kvferry.protocol.errors import InvalidRequest, RoleChangeRefused
from kvferry.protocol.roles import ChangeRole
from kvferry.protocol.worker_metrics import WorkerMetrics
from tests.engine_adapter.mock_sglang import Server
from tests.engine_adapter.test_elastic_engine import sglang
from tests.waiting import until


class Member:
    """The node's membership. kept: why it must keep its role; others: whether another node has it, too."""

    def __init__(self) -> None:
        self.kept, self.others, self.leaving = "", True, False

    async def announce(self) -> bool:
        return True

    async def try_leave_role(self, rest_s: float) -> str:
        self.leaving = not self.kept
        return self.kept

    def keep_role(self) -> None:
        self.leaving = False

    async def has_substitute(self) -> bool:
        return self.others


class Node:
    """A prefill node with this engine. joined: roles in which it joined anew; drained: what it was told of that."""

    def __init__(
        self, engine: SglangEngine, server: Server, process: str, *, elastic: bool = True, within_s: float = 5.0
    ) -> None:
        assert isinstance(engine, ElasticEngine)
        self.engine, self.server, self.member = engine, server, Member()
        self.role, self.role_s, self.busy, self.fails = "prefill", 0.0, False, False
        self.joined, self.drained = list[str](), list[bool]()
        self.watch = EngineWatch(engine, process)
        self.metrics = WorkerMetrics("prefill")
        state = SimpleNamespace(
            settings=SimpleNamespace(role="prefill"), membership=self.member, watch=self.watch,
            lease=lambda: SimpleNamespace(role=self.role, role_s=self.role_s),
        )  # fmt: skip
        node = ChangingNode(lambda: cast("Any", state), self.drained.append, lambda: self.busy, self.rejoin)
        self.changes = RoleChanges(engine, node, self.metrics, elastic=elastic, within_s=within_s)

    async def rejoin(self, role: str) -> None:
        if self.fails:
            raise RuntimeError("no registry")
        self.drained.append(False)
        self.joined.append(role)
        self.role = role

    @property
    def works_on(self) -> bool:
        """Whether it is what it was before, and the engine, too."""
        as_before = (self.role, self.server.behaviour.mode, self.member.leaving) == ("prefill", "prefill", False)
        return as_before and not self.joined and self.drained[-1:] != [True] and not self.watch.fault

    def counted(self, outcome: str) -> float:
        counter: Any = self.metrics.role_changes[outcome]
        return float(counter._value.get())


@asynccontextmanager
async def node(switch: str = "on", **settings: Any) -> AsyncIterator[Node]:
    async with sglang(switch=switch) as (engine, server):
        made = Node(engine, server, (await engine.facts()).process, **settings)
        yield made
        await made.changes.stop()
        made.watch.stop()


DECODE = ChangeRole("decode")


async def test_a_node_drains_changes_its_engine_and_joins_anew() -> None:
    async with node() as made:
        made.busy = True
        task = asyncio.create_task(made.changes.begin(DECODE))
        await until(lambda: made.drained == [True])
        assert made.server.behaviour.mode == "prefill", "requests are running"
        with pytest.raises(RoleChangeRefused, match="changing its role"):
            await made.changes.begin(DECODE)
        made.busy = False
        await task
        await until(lambda: made.joined == ["decode"])
        assert made.server.behaviour.mode == "decode"
        assert made.drained == [True, False]
        await made.changes.begin(DECODE)  # it has the role
        assert (made.joined, made.counted("done"), made.counted("kept")) == (["decode"], 1, 0)


async def test_an_engine_that_is_busy_is_waited_for() -> None:
    async with node() as made:
        made.server.running = 1
        await made.changes.begin(DECODE)
        assert made.joined == []
        made.server.running = 0
        await until(lambda: made.joined == ["decode"])


async def test_health_checks_do_not_keep_the_engine_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watch, "HEALTH_S", 0.0)
    async with node() as made:
        made.watch.start()
        await until(lambda: made.server.checks > 0)
        made.server.running = 1
        await made.changes.begin(DECODE)  # it waits for the engine, and has done so for a second
        seen = 0
        for _ in range(40):
            seen += made.server.checks
            await asyncio.sleep(0.005)
        assert (seen, made.joined) == (0, [])
        made.server.running = 0
        await until(lambda: made.joined == ["decode"])
        await until(lambda: made.server.checks > 0)
        assert not made.watch.fault


async def test_a_role_is_refused_before_the_node_drains() -> None:
    async with node() as made:
        with pytest.raises(InvalidRequest, match="role must be one of"):
            await made.changes.begin(ChangeRole("both"))
        await made.changes.begin(ChangeRole("prefill"))
        made.role_s = 5.0
        with pytest.raises(RoleChangeRefused, match="changed its role 5 s ago"):
            await made.changes.begin(ChangeRole("decode", rest_s=30.0))
        made.role_s, made.member.kept = 0.0, "it is the last prefill node that is ready"
        with pytest.raises(RoleChangeRefused, match="last prefill node"):
            await made.changes.begin(DECODE)
        made.server.behaviour.switch = "off"
        with pytest.raises(RoleChangeRefused, match=r"its engine cannot change its role.*not set on this instance"):
            await made.changes.begin(DECODE)
        assert made.drained == []
        assert made.works_on


async def test_a_node_without_the_flag_never_changes() -> None:
    async with node(elastic=False) as made:
        with pytest.raises(InvalidRequest, match="without --elastic"):
            await made.changes.begin(DECODE)
        assert made.works_on


@pytest.mark.parametrize(
    ("switch", "why"), [("full", "insufficient decode CUDA graph headroom"), ("lies", "but then reports prefill")]
)
async def test_a_refusal_is_told_and_the_node_works_on_for_a_while(
    switch: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node(switch) as made:
        with pytest.raises(RoleChangeRefused, match=why):
            await made.changes.begin(DECODE)
        assert made.works_on
        assert made.drained == [True, False]
        with pytest.raises(RoleChangeRefused, match=f"a change failed 0 s ago.*{why}"):
            await made.changes.begin(DECODE)
        assert made.drained == [True, False], "each try empties the node"
        monkeypatch.setattr(role_changes, "REFUSED_S", 0.0)
        made.server.behaviour.switch = "on"
        await made.changes.begin(DECODE)
        await until(lambda: made.joined == ["decode"])
        assert made.counted("kept") == 1


async def test_a_change_without_an_answer_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_roles, "SWITCH_S", 0.3)
    async with node("hangs") as made:
        with pytest.raises(RoleChangeRefused, match=r"silent for 0\.3 s"):
            await made.changes.begin(DECODE)
        assert made.works_on, "the engine had become a decode engine"


async def test_an_engine_that_breaks_counts_as_gone() -> None:
    async with node("breaks") as made:
        with pytest.raises(RoleChangeRefused, match="restart required"):
            await made.changes.begin(DECODE)
        assert "no role after a failed change" in made.watch.fault
        assert made.watch.gone.is_set()
        assert made.joined == []
        assert made.drained == [True], "no request may come to it any more"


async def test_a_node_that_cannot_join_in_its_new_role_counts_as_gone() -> None:
    async with node() as made:
        made.fails = True
        with pytest.raises(RoleChangeRefused, match="RuntimeError no registry"):
            await made.changes.begin(DECODE)
        assert "no registry" in made.watch.fault
        assert made.drained == [True], "no request may come to it any more"


@pytest.mark.parametrize("reason", ["busy", "alone"])
async def test_what_does_not_end_or_is_needed_keeps_the_role(reason: str) -> None:
    async with node(within_s=0.3) as made:
        made.busy, made.member.others = reason == "busy", reason == "busy"
        with pytest.raises(
            RoleChangeRefused, match="did not end within 0.3 s" if made.busy else "no other prefill node"
        ):
            await made.changes.begin(DECODE)
        assert made.works_on
        assert made.counted("kept") == 1


async def test_a_node_that_ends_gives_up_its_change() -> None:
    async with node() as made:
        made.busy = True
        asking = asyncio.create_task(made.changes.begin(DECODE))
        await until(lambda: made.drained == [True])
        await made.changes.stop()
        await asking
        made.busy = False
        with pytest.raises(RoleChangeRefused, match="stopping"):
            await made.changes.begin(DECODE)
        assert made.works_on

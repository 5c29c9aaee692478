"""Journals' scripts take the way through nodes while the store does not answer this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from kvferry.cluster_state.journal_calls import NO_RELAY_S, PROBE_S, WAIT_S, ScriptFailover, Values
from kvferry.protocol.errors import RegistryFull, RegistryRefuses, RegistryUnavailable


class Way:
    """A way to the store: answers, fails, or is silent."""

    def __init__(self, name: bytes) -> None:
        self.name, self.calls = name, 0
        self.silent, self.error = False, None
        self.answers_after_s = 0.0

    async def run(self, name: str, args: Sequence[str | bytes | int]) -> Values:
        self.calls += 1
        if self.silent:
            await asyncio.sleep(1.0)
            raise RegistryUnavailable("no answer in time")
        await asyncio.sleep(self.answers_after_s)
        if self.error is not None:
            raise self.error
        return (self.name,)

    error: RegistryUnavailable | None


class Both:
    def __init__(self) -> None:
        self.direct, self.relay = Way(b"direct"), Way(b"relay")
        self.scripts = ScriptFailover(self.direct, self.relay)

    async def timed(self) -> tuple[Values, float]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        return await self.scripts.run("read", ["tenant"]), loop.time() - began


@pytest.fixture
async def both() -> Both:
    return Both()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_store_that_answers_costs_no_node_anything(both: Both) -> None:
    assert (await both.timed())[0] == (b"direct",)
    assert both.relay.calls == 0


async def test_a_silent_store_is_reached_through_a_node_and_later_calls_do_not_wait(both: Both) -> None:
    """Each call waited for the store's time limit, and nothing was recorded."""
    both.direct.silent = True
    values, waited_s = await both.timed()
    assert values == (b"relay",)
    assert WAIT_S * 0.9 < waited_s < 0.9
    values, waited_s = await both.timed()
    assert values == (b"relay",)
    assert waited_s < WAIT_S / 2
    both.direct.silent = False
    before = both.relay.calls
    await until(lambda: both.scripts._probing is None)
    assert (await both.timed())[0] == (b"direct",)
    assert both.relay.calls == before


async def test_a_store_that_refuses_connections_is_reached_through_a_node_at_once(both: Both) -> None:
    both.direct.error = RegistryUnavailable("connection refused")
    values, waited_s = await both.timed()
    assert values == (b"relay",)
    assert waited_s < WAIT_S / 2
    await both.scripts.close()


async def test_while_the_store_is_away_for_all_calls_fail_at_once(both: Both) -> None:
    """A request with a key waited a second for the store each time."""
    both.direct.silent, both.relay.error = True, RegistryUnavailable("Redis: no answer")
    with pytest.raises(RegistryUnavailable, match="no answer in time"):
        await both.timed()
    loop = asyncio.get_running_loop()
    began, calls = loop.time(), both.relay.calls
    for _ in range(3):
        with pytest.raises(RegistryUnavailable):
            await both.timed()
    assert loop.time() - began < WAIT_S / 2
    assert both.relay.calls <= calls + 1
    both.direct.silent = False
    await asyncio.sleep(0)
    await until(lambda: both.scripts._probing is None)
    assert (await both.timed())[0] == (b"direct",)
    assert NO_RELAY_S > PROBE_S


async def test_an_error_that_the_store_answers_is_the_answer(both: Both) -> None:
    both.direct.error = RegistryFull("full")
    with pytest.raises(RegistryFull):
        await both.timed()
    assert both.relay.calls == 0
    assert both.scripts._probing is None


async def test_a_late_answer_counts_if_no_node_has_one(both: Both) -> None:
    both.direct.answers_after_s, both.relay.error = 2 * WAIT_S, RegistryUnavailable("no node")
    assert (await both.timed())[0] == (b"direct",)
    assert both.scripts._probing is None


async def test_an_error_of_a_node_does_not_count_while_the_store_may_answer(both: Both) -> None:
    """The node's password had been replaced: its refusal came before the answer of a slow store."""
    both.direct.answers_after_s, both.relay.error = WAIT_S + 0.2, RegistryRefuses("invalid password")
    assert (await both.timed())[0] == (b"direct",)
    assert both.scripts._probing is None
    both.direct.answers_after_s, both.direct.silent = 0.0, True
    with pytest.raises(RegistryRefuses):
        await both.timed()
    await both.scripts.close()


async def test_the_first_answer_counts_on_whichever_way(both: Both) -> None:
    """The store's answer came meanwhile, and waited for a node that did not answer."""
    both.direct.answers_after_s, both.relay.answers_after_s = WAIT_S + 0.2, WAIT_S + 2.0
    values, waited_s = await both.timed()
    assert values == (b"direct",)
    assert waited_s < WAIT_S + 1.0
    assert both.scripts._probing is None


async def test_a_call_that_the_store_answers_after_all_ends_the_way_through_nodes(both: Both) -> None:
    """It is not cancelled either: its connection would be lost, and those of a busy router all at once."""
    both.direct.answers_after_s = WAIT_S + 0.2
    assert (await both.timed())[0] == (b"relay",)
    both.direct.answers_after_s = 0.0
    calls = both.direct.calls
    await until(lambda: both.scripts._probing is None)
    assert both.direct.calls <= calls + 1


async def test_without_nodes_calls_go_to_the_store_alone() -> None:
    direct = Way(b"direct")
    direct.error = RegistryUnavailable("connection refused")
    with pytest.raises(RegistryUnavailable, match="refused"):
        await ScriptFailover(direct).run("read", [])

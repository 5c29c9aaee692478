"""Nodes that change their roles under load, over real HTTP and UCX, placed on by a real router: every stream is exact,
what was cached is found in the new role, and the books of all balance."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import httpx
import pytest

from kvferry.cluster_state.memory_store import MemoryStore
from kvferry.model_files.model_name import ModelName
from kvferry.protocol.errors import InvalidRequest, RoleChangeRefused
from kvferry.protocol.messages import GenerateRequest, PrefillRequest
from kvferry.protocol.roles import ChangeRole
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import pack
from kvferry.protocol.work import Generate
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.dispatch.interface import RequestSpec
from kvferry.router.nodes.node_table import NodeTable
from kvferry.router.request_context import RequestContext
from tests.toy import VOCAB, ToyModel, expected, make_engine, make_job
from tests.waiting import until
from tests.worker_pair import Worker, worker

ROLES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


class Fleet:
    """Four nodes, and a router's view of them."""

    def __init__(self, nodes: dict[str, Worker], cluster: RouterCluster, store: MemoryStore) -> None:
        self.nodes, self.cluster, self.store = nodes, cluster, store
        self.pool = cluster.pool(ModelName(ToyModel.info.name))
        self.reused = self.served = 0
        self._names = count()

    def role(self, name: str) -> str:
        return self.nodes[name].loaded.roles.now

    async def change(self, name: str, role: str, rest_s: float = 0.0) -> None:
        await self.nodes[name].loaded.role_change.begin(ChangeRole(role, rest_s))

    async def changed(self, name: str, role: str) -> None:
        """The node has the role, and the router knows it."""
        await self.change(name, role)
        await until(lambda: self.role(name) == role and not self.nodes[name].loaded.draining)
        await until(lambda: any(e.lease.role == role and e.lease.state == "ready" for e in self.entries(name)))

    def entries(self, name: str) -> list[Any]:
        return [entry for entry in self.cluster.nodes.entries.values() if entry.lease.node_id == name]

    async def ask(self, prompt: list[int], tokens: int) -> tuple[str | None, str | None]:
        """One request, whose every token is checked. Returns where it was computed, and where it began to decode."""
        name, now = f"r{next(self._names)}", time.monotonic()
        work = Generate(SamplingParams(max_tokens=tokens, temperature=0.0))
        dispatch = self.pool.start(RequestSpec(RequestContext(name, now, now + 60.0), name, tuple(prompt), work))
        made = [token async for output in dispatch for token in output.token_ids]
        assert made == expected(prompt, tokens)
        assert dispatch.route
        self.reused += dispatch.route.reuse.cached_len
        self.served += 1
        return dispatch.route.prefill, dispatch.route.decode

    async def settle(self) -> None:
        for node in self.nodes.values():
            await node.settle()


@asynccontextmanager
async def fleet(roles: dict[str, str], step_s: float = 0.005, **settings: Any) -> AsyncIterator[Fleet]:
    store = MemoryStore()
    async with AsyncExitStack() as stack:
        nodes = {}
        for name, role in roles.items():
            engine = make_engine(400)
            slow(engine, step_s)
            opened = worker(role, engine, store=store, node_id=name, elastic=True, **settings)
            nodes[name] = await stack.enter_async_context(opened)
        metrics = RouterMetrics()
        table = NodeTable(store, metrics, poll_s=0.05)
        made = Fleet(nodes, RouterCluster(store, store, metrics, nodes=table), store)
        await stack.enter_async_context(made.cluster)
        await until(lambda: sum(made.pool.ready().values()) == len(roles))
        yield made


def slow(engine: Any, step_s: float) -> None:
    """A step takes as long as on a device of medium size: streams last while roles change."""
    run = engine.runner.run

    def slowly(*step: Any) -> Any:
        time.sleep(step_s)
        return run(*step)

    engine.runner.run = slowly


def prompts(seed: int) -> list[list[int]]:
    """That begin alike."""
    rng = random.Random(seed)
    stem = rng.choices(range(VOCAB), k=32)
    return [stem + rng.choices(range(VOCAB), k=6) for _ in range(4)]


async def load(made: Fleet, seed: int, until_set: asyncio.Event) -> None:
    """One request after another, in a few lanes."""
    rng = random.Random(seed)
    while not until_set.is_set():
        await made.ask(rng.choice(prompts(1)), rng.choice([3, 12, 60, 120]))


async def test_roles_change_both_ways_under_load_and_every_stream_is_exact() -> None:
    async with fleet(ROLES) as made:
        over = asyncio.Event()
        lanes = [asyncio.create_task(load(made, seed, over)) for seed in range(6)]
        epochs = {name: node.target.epoch for name, node in made.nodes.items()}
        for name in ("p1", "d1", "p1", "d1"):
            await asyncio.sleep(0.5)
            await made.changed(name, "decode" if made.role(name) == "prefill" else "prefill")
        over.set()
        await asyncio.gather(*lanes)
        assert {name: made.role(name) for name in ROLES} == ROLES
        assert made.served > 12
        assert epochs == {name: node.target.epoch for name, node in made.nodes.items()}
        for name, other in (("p1", "decode"), ("d1", "prefill")):
            changes = made.nodes[name].node.metrics.registry.get_sample_value
            for each in ("prefill", "decode"):
                labels = {"role": each, "outcome": "done", "model_name": "toy"}
                assert changes("kvferry_role_changes_total", labels) == 1
            assert changes("kvferry_kv_pool_blocks", {"role": other, "model_name": "toy"}) is None
        await made.settle()
        assert not made.pool.background_calls.open


async def test_what_was_cached_is_found_in_the_other_role() -> None:
    """A prefill node alone with its role is not to be had: the other one is paused, so that the first computes."""
    async with fleet({"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}) as made:
        prompt = prompts(2)[0]
        first, _ = await made.ask(prompt, 3)
        assert first in ("p1", "p2")
        await asyncio.sleep(0.3)  # its rows are published
        cached = made.nodes[first].loaded.engine.load.cached_blocks
        assert cached >= len(prompt) // 4
        await made.changed(first, "decode")
        assert made.nodes[first].loaded.engine.load.cached_blocks == cached
        entry = next(iter(made.entries(first)))
        for node in made.cluster.nodes.entries.values():
            if node.lease.node_id in ("d1", "d2"):
                made.cluster.nodes.breakers.node_failed(node.key)
        before = made.reused
        _, decode = await made.ask(prompt, 3)
        assert decode == first, entry.lease
        assert made.reused - before >= 32
        await made.settle()


async def test_streams_move_from_a_decode_node_that_becomes_prefill() -> None:
    async with fleet({"p1": "prefill", "d1": "decode", "d2": "decode"}, step_s=0.03) as made:
        streams = [asyncio.create_task(made.ask(each, 200)) for each in prompts(3)]
        running = {name: made.nodes[name].loaded.engine for name in ("d1", "d2")}
        await until(lambda: sum(engine.load.running_requests for engine in running.values()) == len(streams))
        leaves = max(running, key=lambda name: running[name].load.running_requests)
        await made.changed(leaves, "prefill")
        assert not any(stream.done() for stream in streams)
        await asyncio.gather(*streams)
        moved = made.nodes[leaves].node.metrics.registry.get_sample_value
        assert moved("kvferry_moves_total", {"role": "decode", "outcome": "moved", "model_name": "toy"}) >= 1
        await made.ask(prompts(4)[0], 5)
        await made.settle()


async def test_the_last_node_of_a_role_keeps_it_and_works_on() -> None:
    async with fleet({"p1": "prefill", "d1": "decode"}) as made:
        for name, role in (("p1", "decode"), ("d1", "prefill")):
            with pytest.raises(RoleChangeRefused, match="the last"):
                await made.change(name, role)
            (lease,) = [lease for lease in await made.store.nodes() if lease.node_id == name]
            assert (lease.state, lease.leaving) == ("ready", False)
        await made.ask(prompts(5)[0], 4)
        await made.settle()


async def test_of_two_at_once_at_most_one_changes_and_then_roles_rest() -> None:
    async with fleet({"p1": "prefill", "p2": "prefill", "d1": "decode"}) as made:
        outcomes = await asyncio.gather(
            made.change("p1", "decode"), made.change("p2", "decode"), return_exceptions=True
        )
        assert sum(isinstance(each, RoleChangeRefused) for each in outcomes) >= 1
        if all(isinstance(each, RoleChangeRefused) for each in outcomes):
            await made.change("p1", "decode")
        await until(lambda: [made.role(name) for name in ("p1", "p2")].count("decode") == 1)
        await until(lambda: not any(node.loaded.draining for node in made.nodes.values()))
        changed, other = ("p1", "p2") if made.role("p1") == "decode" else ("p2", "p1")
        with pytest.raises(RoleChangeRefused, match="changed its role"):
            await made.change(changed, "prefill", 60.0)
        with pytest.raises(RoleChangeRefused, match="less than 60 s ago"):
            await made.change("d1", "prefill", 60.0)
        assert made.role(other) == "prefill"
        await made.settle()


async def test_who_is_asked_for_what_its_role_does_not_do_refuses_and_the_request_goes_elsewhere() -> None:
    async with fleet(ROLES) as made, httpx.AsyncClient(trust_env=False) as http:
        target = made.nodes["d2"].target
        await made.changed("p1", "decode")
        await made.changed("d1", "prefill")
        job = make_job("late", [1] * 20)
        was_prefill, was_decode = (made.nodes[name].node.address.url for name in ("p1", "d1"))
        for url, message in (
            (f"{was_prefill}/attempts/prefill", PrefillRequest(job, target)),
            (f"{was_decode}/attempts/generate", GenerateRequest(job)),
        ):
            answer = await http.post(url, content=pack(message))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        entry = made.entries("d1")[0]
        entry.renew(replace(entry.lease, role="decode"))  # a router that is late
        await asyncio.gather(*(made.ask(each, 6) for each in prompts(6)))
        await made.settle()


async def test_a_grant_is_refused_by_a_node_that_does_not_decode_any_more() -> None:
    """As a prefill node asks for one which heard of the decode node before it changed."""
    async with fleet(ROLES) as made, httpx.AsyncClient(trust_env=False) as http:
        target = made.nodes["d1"].target
        await made.changed("d1", "prefill")
        url = made.nodes["p1"].node.address.url
        answer = await http.post(
            f"{url}/attempts/prefill", content=pack(PrefillRequest(make_job("g", [1] * 20), target))
        )
        assert b"grant_refused" in answer.content
        await made.settle()


async def test_a_node_whose_streams_do_not_end_stays_what_it_is() -> None:
    async with fleet({"p1": "prefill", "d1": "decode", "d2": "decode"}, drain_timeout=0.5) as made:
        (stream,) = [asyncio.create_task(made.ask(prompts(7)[0], 150))]
        await until(lambda: any(made.nodes[name].loaded.engine.load.running_requests for name in ("d1", "d2")))
        busy = "d1" if made.nodes["d1"].loaded.engine.load.running_requests else "d2"
        made.nodes["d1" if busy == "d2" else "d2"].pause_at(0)
        made.nodes[busy].pause_at(0)
        await until(lambda: made.nodes[busy].paused)
        await made.change(busy, "prefill")
        await until(lambda: made.nodes[busy].loaded.draining)
        await until(lambda: not made.nodes[busy].loaded.draining)
        assert made.role(busy) == "decode"
        kept = made.nodes[busy].node.metrics.role_changes["kept"]._value.get()
        assert kept == 1
        for name in ("d1", "d2"):
            made.nodes[name].resume()
        await stream
        await made.settle()


async def test_the_other_decode_node_dies_in_the_middle_of_a_change() -> None:
    """Then the last one stays: its lease is taken away as its process would lose it."""
    async with fleet({"p1": "prefill", "d1": "decode", "d2": "decode"}) as made:
        d1, d2 = made.nodes["d1"], made.nodes["d2"]
        stream = asyncio.create_task(made.ask(prompts(8)[0], 60))
        await until(lambda: d1.loaded.engine.load.running_requests or d2.loaded.engine.load.running_requests)
        stays, dies = (d1, d2) if d1.loaded.engine.load.running_requests else (d2, d1)
        stays.pause_at(0)
        await until(lambda: stays.paused)
        await made.change(stays.node.address.node_id, "prefill")
        dies.loaded.draining = True
        await dies.loaded._membership.announce()
        stays.resume()
        await stream
        await until(lambda: not stays.loaded.draining)
        assert stays.loaded.roles.now == "decode"
        dies.loaded.draining = False
        await dies.loaded._membership.announce()
        await made.settle()


async def test_a_node_that_ends_in_the_middle_of_a_change_drains_as_any() -> None:
    async with fleet({"p1": "prefill", "p2": "prefill", "d1": "decode"}) as made:
        node = made.nodes["p1"]
        node.pause_at(0)
        held = asyncio.create_task(made.ask(prompts(9)[0], 2))
        await asyncio.sleep(0.2)
        await made.change("p1", "decode")
        node.resume()
        await node.loaded.role_change.stop()
        await held
        with pytest.raises(RoleChangeRefused):
            await made.change("p1", "decode")
        await made.settle()


async def test_a_node_without_elastic_keeps_its_role() -> None:
    async with worker("prefill", make_engine()) as node, httpx.AsyncClient(trust_env=False) as http:
        with pytest.raises(InvalidRequest, match="without --elastic"):
            await node.loaded.role_change.begin(ChangeRole("decode"))
        url = f"{node.node.address.url}/role"
        assert (await http.post(url, content=pack(ChangeRole("router")))).status_code == 400
        assert (await http.get(f"{node.node.address.url}/health")).json()["role"] == "prefill"

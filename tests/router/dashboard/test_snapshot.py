"""The state of a cluster as the dashboard shows it: exact numbers of known traffic, within its bounds."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.model_files.model_name import ModelName
from kvferry.placement.types import Demand, Placement
from kvferry.protocol.lease import Load, Rates, Sent
from kvferry.protocol.messages import PrefillRequest, ShipDone
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router import request_log
from kvferry.router.dashboard.history import History, Reading
from kvferry.router.dashboard.merged import merged
from kvferry.router.dashboard.page import view
from kvferry.router.dashboard.snapshot import EVENTS, RECENT, RUNNING, SnapshotBuilder
from kvferry.router.dashboard.state import Counts, State
from kvferry.router.dispatch.cluster import RouterCluster
from kvferry.router.nodes.client import NodeClient
from kvferry.router.tenants.keys import entry
from tests.api_parts import app_of, demo_text
from tests.fake_workers import CRASH, PROMPT, Answer, Bench, FakeWorker, collect, decode, prefill
from tests.waiting import until

LOAD = Load(
    waiting_requests=2, waiting_tokens=300, running_requests=5, free_blocks=400, active_blocks=350, cached_blocks=200,
    granted_blocks=50, total_blocks=1000,
)  # fmt: skip


class Watched:
    """A bench, an API in front of it, and its board."""

    def __init__(self, *workers: FakeWorker, **settings: Any) -> None:
        self.bench = Bench(workers or (prefill(), decode(changes={"load": LOAD, "rates": Rates(800.0, 0.03, 2e9)})))
        self.board = SnapshotBuilder(self.bench.all, self.bench.metrics)
        app = app_of(self.bench.cluster, demo_text(), self.bench.metrics, RouterSettings(**settings), board=self.board)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")

    async def __aenter__(self) -> Watched:
        await self.bench.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.bench.__aexit__(*error)

    async def complete(
        self, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 4, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "ignore_eos": True}
        return await self.http.post("/v1/completions", json=body, headers=headers)

    async def state(self, **headers: str) -> State:
        answer = await self.http.get("/dashboard/state", headers=headers)
        assert answer.status_code == 200
        return State.model_validate_json(answer.content)


async def test_known_traffic_makes_exact_numbers() -> None:
    async with Watched() as watched:
        for number in range(3):
            answer = await watched.complete(headers={"x-request-id": f"order-{number}"})
            assert answer.status_code == 200
        await until(lambda: len(watched.bench.all.request_log.ships) == 3)
        state = await watched.state()
    assert state.router == "router-test"
    assert state.models == ["m"]
    assert state.registry
    assert (state.running, state.running_total, state.queued, state.suspects) == ([], 0, 0, [])
    assert state.total.prompt == {"computed": 144, "reused_prefill": 48, "reused_decode": 0, "fetched": 0}
    assert state.total.hit_rate == 0.25
    assert (state.total.requests, state.total.failed, state.total.output) == (3, 0, 12)
    assert state.total.first_tokens == 3
    (transfer,) = state.transfers
    assert (transfer.source, transfer.target, transfer.transfers, transfer.blocks) == ("p1", "d1", 3, 48)
    assert transfer.bytes_per_s * state.transfers_s == 48_000
    assert [row.id for row in state.recent] == ["order-2", "order-1", "order-0"]
    for row in state.recent:
        assert (row.prefill, row.decode, row.prompt, row.cached, row.output) == ("p1", "d1", 64, 16, 4)
        assert (row.outcome, row.retries, row.work, row.model) == ("done", 0, "generate", "m")
        assert row.first_token_s is not None
        assert 0 <= row.queued_s < row.first_token_s < row.seconds
    assert [(event.kind, event.nodes) for event in reversed(state.events)] == [("joined", ["p1"]), ("joined", ["d1"])]
    one, other = state.nodes
    assert (one.id, one.role, one.state, one.trouble) == ("p1", "prefill", "ready", "")
    assert (other.id, other.running, other.waiting, other.waiting_tokens, other.streams) == ("d1", 5, 2, 300, 0)
    assert other.blocks.model_dump() == {"active": 350, "cached": 200, "granted": 50, "free": 400, "total": 1000}
    assert (other.prefill_tokens_per_s, other.step_s, other.ship_bytes_per_s) == (800.0, 0.03, 2e9)


async def test_a_request_under_way_is_shown_with_what_it_has_so_far() -> None:
    async with Watched(prefill(), decode(step_s=0.02)) as watched:
        asked = asyncio.create_task(watched.complete(max_tokens=60))
        await until(lambda: any(row.output > 3 for row in watched.board.state().running))
        state = await watched.state()
        (row,) = state.running
        assert (row.outcome, row.ago_s, row.decode) == ("running", None, "d1")
        assert 3 < row.output < 60
        assert [node.streams for node in state.nodes] == [0, 1]
        await asked
        assert watched.board.state().recent[0].output == 60


async def test_what_failed_is_told_with_the_rung_that_followed() -> None:
    async def crashes(worker: FakeWorker, request: PrefillRequest) -> Answer:
        yield CRASH

    async with Watched(prefill("p1", prefill_script=crashes), decode()) as watched:
        assert (await watched.complete(headers={"x-request-id": "unlucky"})).status_code == 200
        state = await watched.state()
        (event,) = [each for each in state.events if each.request]
        assert (event.kind, event.request, event.nodes) == ("local_prefill", "unlucky", ["p1"])
        assert event.told.startswith("node_died") or event.told.startswith("node_lost"), event.told
        assert [(row.retries, row.prefill, row.decode) for row in state.recent] == [(1, "", "d1")]
        (suspect,) = [each for each in state.suspects if each.kind == "node"]
        assert suspect.prefill == "p1"
        assert 0 < suspect.seconds <= 2
        assert {node.id: node.trouble for node in state.nodes}["p1"] in ("suspected", "unreachable")


async def test_a_client_that_leaves_is_a_request_that_was_cancelled() -> None:
    async with Watched(prefill(), decode(step_s=0.02)) as watched:
        dispatch = watched.bench.start(100)
        async for _ in dispatch:
            await dispatch.cancel()
            break
        assert [row.outcome for row in watched.board.state().recent] == ["cancelled"]
        assert watched.board.state().running_total == 0


async def test_a_text_that_ends_at_a_stop_string_is_a_request_that_is_done() -> None:
    async with Watched(prefill(), decode(step_s=0.02)) as watched:
        body = {"prompt": list(PROMPT), "max_tokens": 100, "ignore_eos": True}
        whole = (await watched.http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        stopped = (await watched.http.post("/v1/completions", json={**body, "stop": [whole[4:8]]})).json()
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["usage"]["completion_tokens"] < 100
        await until(lambda: not watched.board.state().running)
        assert [row.outcome for row in watched.board.state().recent] == ["done", "done"]


async def test_copies_and_moves_are_what_nodes_tell_of_them() -> None:
    sent = (Sent("copy", "p1", 4, 60, 3e6), Sent("move", "d2", 2, 30, 9e6))
    async with Watched(prefill("p1"), decode("d1", changes={"sent": sent}), decode("d2")) as watched:
        assert (await watched.complete()).status_code == 200
        await until(lambda: len(watched.board.state().transfers) == 3)
        state = await watched.state()
    assert [(each.kind, each.source, each.transfers, each.blocks) for each in state.transfers][1:] == [
        ("move", "d1", 2, 30), ("copy", "d1", 4, 60),
    ]  # fmt: skip
    html = view(state)
    for told in ("4 copies, 60 blocks", "2 migrations, 30 blocks", "d1 to p1 3 MB/s in copies"):
        assert told in html, told


async def test_requests_that_are_turned_away_are_shown_by_reason() -> None:
    async with Watched(max_inflight=1, queue_timeout=0.2) as watched:
        watched.board._history.take_reading()
        running = asyncio.create_task(watched.complete(max_tokens=40))
        await until(lambda: watched.board.state().running)
        assert (await watched.complete()).status_code == 429
        await running
        for name in ("p1", "d1"):
            await watched.bench.store.withdraw(name, 1)
            watched.bench[name].crash()
        await until(lambda: not watched.board.state().nodes)
        assert (await watched.complete()).status_code == 503
        assert (await watched.complete(max_tokens=-1)).status_code == 400, "its own mistake is none of these"
        state = await watched.state()
    assert state.total.refused == {"429 overloaded": 1, "503 no_nodes": 1}
    assert Counts.of(state.points).refused == state.total.refused
    html = view(state)
    assert "429 overloaded 1" in html
    assert "503 no nodes 1" in html


async def test_quarantined_pairs_are_shown_until_they_are_not() -> None:
    async with Watched(prefill("p1"), prefill("p2"), decode()) as watched:
        breakers, keys = watched.bench.nodes.breakers, {key[0]: key for key in watched.bench.nodes.entries}
        for _ in range(3):
            breakers.corrupt(keys["p1"], keys["d1"])
        (suspect,) = watched.board.state().suspects
        assert (suspect.kind, suspect.prefill, suspect.decode) == ("quarantine", "p1", "d1")
        assert 590 < suspect.seconds <= 600
        breakers.corrupt(keys["p2"], keys["d1"])
        told = {(each.prefill, each.decode) for each in watched.board.state().suspects}
        assert told == {("p1", "d1"), ("", "d1")}
        assert {node.id: node.trouble for node in watched.board.state().nodes}["d1"] == "quarantined"


async def test_nodes_that_leave_and_drain_are_events() -> None:
    async with Watched(prefill("p1"), decode("d1"), decode("d2")) as watched:
        bench = watched.bench
        await bench.store.announce(replace(bench["d2"].lease, state="draining"))
        await until(lambda: watched.board.state().events[0].kind == "draining")
        await bench.store.withdraw("d2", 1)
        bench["d2"].crash()
        await until(lambda: watched.board.state().events[0].kind == "lost")
        assert watched.board.state().events[0].nodes == ["d2"]
        assert [node.id for node in watched.board.state().nodes] == ["p1", "d1"]


async def test_two_routers_show_the_same_nodes_and_each_its_own_requests() -> None:
    async with Watched() as watched:
        store, metrics = watched.bench.store, RouterMetrics()
        cluster = RouterCluster(store, store, metrics, client=NodeClient("router-other"))
        pool, board = cluster.pool(ModelName("m")), SnapshotBuilder(cluster, metrics)
        async with cluster:
            await until(lambda: all(entry.open for entry in cluster.nodes.entries.values()))
            await collect(pool.start(watched.bench.start()._spec))
            one, other = watched.board.state(), board.state()
        assert (one.router, other.router) == ("router-test", "router-other")
        assert one.nodes == other.nodes
        assert (len(one.recent), len(one.transfers)) == (0, 0)
        assert (len(other.recent), len(other.transfers)) == (1, 1)
        assert "requests, ships and events are this one's" in view(one)


async def test_tenants_see_no_names_of_others_requests(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("".join(entry(name, f"key-{name}") for name in "ab"))
    async with Watched(api_keys=str(file), api_key="own") as watched:
        for name in "ab":
            await watched.complete(headers={"authorization": f"Bearer key-{name}", "x-request-id": f"of-{name}"})
        watched.bench.all.request_log.retried(watched.bench.all.request_log.recent[0], "hedge", ["p1"], "told")
        for path in ("/dashboard/state", "/dashboard/view"):
            assert (await watched.http.get(path)).status_code == 401
        page = await watched.http.get("/dashboard")
        assert page.status_code == 200
        assert "of-a" not in page.text
        assert "p1" not in page.text
        of_b = await watched.state(authorization="Bearer key-b")
        assert [(row.id, row.tenant) for row in of_b.recent] == [("of-b", "b"), ("", "")]
        assert [(each.kind, each.request, each.tenant, each.told) for each in of_b.events[:1]] == [
            ("hedge", "", "", "")
        ]
        assert "of-a" not in (await watched.http.get("/dashboard/view", headers={"x-api-key": "key-b"})).text
        own = await watched.state(authorization="Bearer own")
        assert [row.id for row in own.recent] == ["of-b", "of-a"]
        assert own.events[0].request == "of-a"


async def test_what_is_remembered_is_bounded() -> None:
    async with Watched() as watched:
        told = watched.bench.all.request_log
        await collect(watched.bench.start())
        (record,) = told.recent
        for _ in range(5000):
            told.recent.append(record)
            told.retried(record, "hedge", ["p1"], "x" * 10_000)
            told.shipped(watched_placement(watched), ShipDone("r", 0, 1, 100, 0.001, 0.0))
        assert (len(told.recent), len(told.notes), len(told.ships)) == (
            request_log.RECENT, request_log.NOTES, request_log.SHIPS,
        )  # fmt: skip
        for number in range(RUNNING + 5):
            told.begin(watched.bench.start()._spec, f"m{number}", [])
        state = watched.board.state()
        assert (len(state.recent), len(state.events), len(state.running)) == (RECENT, EVENTS, RUNNING)
        assert state.running_total == RUNNING + 5
        assert len(state.events[0].told) == request_log.MAX_DETAIL
        (transfer,) = state.transfers
        assert transfer.transfers == request_log.SHIPS
        assert 0 < state.transfers_s < 20, "no more seconds than are remembered"
        assert len(view(state)) < 150_000
        told.running.clear()


def watched_placement(watched: Watched) -> Placement:
    return watched.bench.cluster.place(Demand(total_len=64), {})


async def test_a_record_lets_go_of_its_tokens() -> None:
    async with Watched() as watched:
        await collect(watched.bench.start(6))
        (record,) = watched.bench.all.request_log.recent
        assert record.output == 6
        assert record._tokens == ()


async def test_what_clients_named_is_text_on_the_page_and_in_json() -> None:
    nasty = "</td><script>alert(1)</script>&\"'`{{8191*8191}}\x1b[31m"
    async with Watched() as watched:
        told = watched.bench.all.request_log
        dispatch = watched.bench.start()
        record = told.begin(dispatch._spec, nasty, [1])
        record.request_id = record.tenant = record.prefill = record.decode = nasty
        told.retried(record, nasty, [nasty], nasty)
        told.node(nasty, nasty, nasty)
        html = view(watched.board.state())
        told.end(record, nasty)
        html += view(watched.board.state())
        state = watched.board.state()
        assert "<script" not in html
        assert "&lt;script&gt;alert(1)" in html
        assert "67092481" not in html
        for quote in ("`{{8191*8191}}", "&#34;", "&#39;"):
            assert quote in html
        assert json.loads(state.model_dump_json())["recent"][0]["id"] == nasty


async def test_points_are_what_was_counted_between_two_looks() -> None:
    async with Watched() as watched:
        now = 100.0
        history = History(watched.bench.metrics, lambda: now)
        history.take_reading()
        await watched.complete()
        watched.bench.metrics.itl.labels("m").observe(0.02, 3)
        now = 105.0
        history.take_reading()
        now = 107.5
        watched.bench.metrics.reuse.misses.labels("m", "evicted").inc(32)
        watched.bench.metrics.requests.labels("/v1/completions", "503").inc()
        points, total = history.growth()
    first, last = points
    assert (first.ago_s, first.seconds, first.requests, first.failed, first.output) == (2.5, 5.0, 1, 0, 4)
    assert sum(first.prompt.values()) == 64
    assert (last.ago_s, last.seconds, last.requests, last.failed, last.first_token_s) == (0.0, 2.5, 1, 1, None)
    assert last.missed["evicted"] == 32
    both = Counts.of(points)
    assert (both.seconds, both.requests, both.failed, both.missed) == (7.5, 2, 1, total.missed)
    assert both.first_token_s == total.first_token_s
    assert (last.later_tokens, last.itl_s) == (0, None)
    assert both.later_tokens == total.later_tokens >= 3
    assert both.itl_s == total.itl_s == pytest.approx(first.itl_s)


async def test_the_history_keeps_no_more_than_it_shows() -> None:
    async with Watched() as watched:
        history = History(watched.bench.metrics)
        for _ in range(500):
            history.take_reading()
        points, _ = history.growth()
        assert len(points) == 121
        assert isinstance(history._readings[0], Reading)


async def test_targets_are_told_by_tenant_and_to_each_its_own() -> None:
    async with Watched() as watched:
        metrics = watched.bench.metrics
        for tenant, outcome, count in (("a", "met", 3), ("a", "rejected", 1), ("b", "missed", 2)):
            metrics.ttft_targets.labels(tenant, outcome).inc(count)
        metrics.itl_targets.labels("a", "met").inc(4)
        own = watched.board.state("a")
        everyone = watched.board.state()
    told = [(row.target, row.met, row.missed, row.rejected, row.share) for row in own.targets]
    assert told == [("itl", 4, 0, 0, 1.0), ("ttft", 3, 0, 1, 0.75)]
    assert [(row.tenant, row.target) for row in everyone.targets] == [("a", "itl"), ("a", "ttft"), ("b", "ttft")]
    (other,) = everyone.targets[2:]
    assert (other.missed, other.share) == (2, 0.0)
    page = view(everyone)
    assert "75.0 %" in page or "75 %" in page
    assert "<td>ITL</td>" in page
    both = merged(everyone, [own], 2).targets
    assert [(row.tenant, row.target, row.met) for row in both] == [("a", "itl", 8), ("a", "ttft", 6), ("b", "ttft", 0)]

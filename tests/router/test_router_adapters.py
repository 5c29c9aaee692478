"""Adapters as a router has them: who holds which, who is asked, how nodes come to load them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.errors import InvalidRequest, NoNodes
from kvferry.protocol.hashing import chain, root_hash
from kvferry.protocol.messages import AttemptFailed, PrefillRequest
from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.app import create_app
from kvferry.router.api.served_models import ServedModel, ServedModels
from kvferry.router.text.encoding import Encoder
from kvferry.router.text.renderer import Renderer
from tests.api_parts import demo_text, error_of
from tests.fake_workers import BLOCK, PROMPT, Bench, FakeWorker, collect, decode, expected, ids, prefill
from tests.waiting import until

X = AdapterName("x", "id-x")
HOLDS = {"adapters": (X,)}
MODEL = "SmolLM2-135M-Instruct"


class House(Bench):
    """Two nodes of each role, of which the second ones hold the adapter x; an API before them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__([prefill("p1"), decode("d1"), prefill("p2", changes=HOLDS), decode("d2", changes=HOLDS)])
        text = demo_text()
        metrics = self.metrics.of(text.name)
        pools = ServedModels(ServedModel(text, self.cluster, metrics, Encoder(text), Renderer(text.template)))
        app = create_app(RouterSettings(**settings), pools, self.metrics)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")

    async def complete(self, model: str) -> httpx.Response:
        return await self.http.post(
            "/v1/completions", json={"model": model, "prompt": "Once upon a time " * 20, "max_tokens": 3}
        )

    async def change(self, what: str, name: str, **body: str) -> httpx.Response:
        return await self.http.post(f"/v1/{what}_lora_adapter", json={"lora_name": name, **body})

    def holders(self, name: str) -> set[str]:
        return {key for key, worker in self.workers.items() if name in [each.name for each in worker.lease.adapters]}


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    async with House(allow_lora_updates=True) as bench:
        await until(lambda: "x" in bench.cluster.adapters.ids)
        yield bench


async def test_requests_with_an_adapter_go_only_to_nodes_that_hold_it(house: House) -> None:
    for _ in range(4):
        answer = await house.complete("x")
        assert answer.headers["x-kvferry-route"].startswith("prefill=p2 decode=d2"), answer.text
        assert answer.json()["model"] == "x"
    assert {request.job.adapter for request in house["p2"].prefills} == {"id-x"}
    routes = {(await house.complete(MODEL)).headers["x-kvferry-route"].split(" reused")[0] for _ in range(4)}
    assert len(routes) > 1
    assert {request.job.adapter for request in house["p1"].prefills} == {""}


async def test_blocks_are_looked_up_under_the_adapter_s_root(house: House) -> None:
    found = []
    index = house.store.longest_prefix

    async def spy(hashes: list[bytes], nodes: dict[str, int]) -> dict[str, int]:
        found.append(list(hashes))
        return await index(hashes, nodes)

    house.store.longest_prefix = spy  # type: ignore[method-assign, assignment]
    for adapter in ("", "id-x"):
        await collect(house.start(2, adapter=adapter))
    assert found == [chain(root_hash("fp", "", adapter), PROMPT, BLOCK) for adapter in ("", "id-x")]
    assert found[0][0] != found[1][0]


async def test_adapters_are_listed_behind_their_model(house: House) -> None:
    listed = (await house.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in listed] == [
        (MODEL, MODEL, None),
        ("x", "id-x", MODEL),
    ]
    assert (await house.http.get("/v1/models/x")).json() == listed[1]
    missing = error_of(await house.complete("y"))
    assert (missing["code"], "'x'" in missing["message"]) == ("model_not_found", True)


async def test_an_engine_of_another_kind_is_not_asked_to_load_an_adapter(house: House) -> None:
    engine = decode("d9", changes={"fingerprint": "v", "engine": "vllm 0.32.0"}, refusal=InvalidRequest("no such path"))
    await house.add(engine)
    await until(lambda: len(house.cluster.model.groups) == 2)
    answer = await house.change("load", "y", lora_path="/y")
    assert answer.status_code == 200, answer.text
    assert house.holders("y") == {"p1", "d1", "p2", "d2"}


async def test_a_model_that_lost_its_nodes_still_knows_its_adapters(house: House) -> None:
    for node in ("p2", "d2"):
        house[node].crash()
        await house.store.withdraw(node, 1)
    await until(lambda: "x" not in house.cluster.adapters.ids)
    assert (await house.complete("x")).status_code == 404, "the others live and hold none"
    for node in ("p1", "d1"):
        held = replace(house[node].lease, adapters=(X,))
        await house.store.announce(held)
    await until(lambda: "x" in house.cluster.adapters.ids)
    for node in ("p1", "d1"):
        await house.store.withdraw(node, 1)
        house[node].crash()
    await until(lambda: not house.cluster.model.members)
    answer = await house.complete("x")
    assert (answer.status_code, error_of(answer)["code"]) == (503, "no_nodes")


async def test_the_ladder_counts_only_prefill_nodes_that_hold_it(house: House) -> None:
    """p1 lives, and is none to go to."""

    async def failing(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        yield AttemptFailed(request.job.request_id, request.job.attempt, "server_error", "scripted")

    house["p2"].prefill_script = failing
    assert ids(await collect(house.start(4, adapter="id-x"))) == expected(PROMPT, 4)
    assert house.retries() == {"same_prefill": 1, "local_prefill": 1}
    assert not house["p1"].prefills


async def test_an_adapter_that_no_living_decode_node_holds_is_refused(house: House) -> None:
    with pytest.raises(NoNodes, match="'m' has no decode node"):
        await collect(house.start(4, adapter="id-gone"))


async def test_all_nodes_load_and_unload_and_it_can_be_asked_for_at_once(house: House) -> None:
    loaded = await house.change("load", "y", lora_path="/adapters/y")
    assert (loaded.status_code, "'y' added" in loaded.text) == (200, True)
    assert house.holders("y") == {"p1", "d1", "p2", "d2"}
    assert (await house.complete("y")).status_code == 200
    assert (await house.change("unload", "y")).status_code == 200
    assert house.holders("y") == set()
    assert (await house.complete("y")).status_code == 404
    again = await house.change("unload", "y")
    assert (again.status_code, error_of(again)["param"]) == (404, "lora_name")


async def test_where_one_node_refuses_all_is_as_it_was(house: House) -> None:
    house["d2"].refusal = InvalidRequest("its rank is 65 and --max-lora-rank is 64", param="lora_path")
    refused = await house.change("load", "y", lora_path="/adapters/y")
    assert (refused.status_code, error_of(refused)["param"]) == (400, "lora_path")
    assert "rank is 65" in error_of(refused)["message"]
    assert house.holders("y") == set()
    assert house.holders("x") == {"p2", "d2"}
    assert (await house.complete("y")).status_code == 404


@pytest.mark.parametrize(
    ("what", "body", "status"),
    [
        ("load", {"lora_name": "y"}, 400),
        ("load", {"lora_name": "", "lora_path": "/y"}, 400),
        ("load", {"lora_name": MODEL, "lora_path": "/y"}, 400),
        ("load", {"lora_name": "y", "lora_path": "/y", "model": "other"}, 404),
        ("unload", {"lora_name": "y"}, 404),
        ("unload", {"lora_name": MODEL}, 404),
    ],
)
async def test_what_cannot_be_loaded_or_unloaded(house: House, what: str, body: dict[str, str], status: int) -> None:
    answer = await house.http.post(f"/v1/{what}_lora_adapter", json=body)
    assert answer.status_code == status, answer.text
    error_of(answer)


async def test_nothing_is_loaded_where_it_is_not_allowed() -> None:
    async with House() as bench:
        for what in ("load", "unload"):
            answer = await bench.change(what, "y", lora_path="/y")
            assert (answer.status_code, error_of(answer)["code"]) == (403, "forbidden")
            assert "--allow-lora-updates" in error_of(answer)["message"]
        assert bench.holders("y") == set()

"""Two models behind one router, on fake workers: who is asked, who is told of, who is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest_asyncio

from kvferry.cluster_state.index import owner
from kvferry.model_files.model_name import ModelName
from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.app import create_app
from kvferry.router.api.served_models import ServedModel, ServedModels
from kvferry.router.text.encoding import Encoder
from kvferry.router.text.renderer import Renderer
from tests.api_parts import demo_text, error_of, events
from tests.fake_workers import Bench, FakeWorker, decode, prefill
from tests.waiting import until

NAMES = (ModelName("m", ("first", "alias")), ModelName("n"))


def of(model: str) -> dict[str, Any]:
    return {"model": model, "fingerprint": f"fp-{model}", "max_model_len": {"m": 300, "n": 200}[model]}


class House(Bench):
    """Nodes of both models, and an API in front of them."""

    def __init__(self, workers: Sequence[FakeWorker]) -> None:
        super().__init__(workers, model=NAMES[0])
        self.other = self.all.pool(NAMES[1])
        texts = [replace(demo_text(), called=name) for name in NAMES]
        clusters = (self.cluster, self.other)
        pools = ServedModels(
            *(
                ServedModel(t, c, self.metrics.of(t.name), Encoder(t), Renderer(t.template))
                for t, c in zip(texts, clusters, strict=True)
            )
        )
        app = create_app(RouterSettings(), pools, self.metrics)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router")

    async def complete(self, model: str, **body: Any) -> httpx.Response:
        asked = {"model": model, "prompt": "Once upon a time", "max_tokens": 4, **body}
        return await self.http.post("/v1/completions", json=asked)


@pytest_asyncio.fixture
async def house() -> AsyncIterator[House]:
    workers = [make(f"{make.__name__[0]}-{m}", changes=of(m)) for m in ("m", "n") for make in (prefill, decode)]
    bench = House(workers)
    async with bench:
        await until(lambda: bool(bench.other.usable("decode")))
        yield bench


async def test_every_name_leads_to_its_own_nodes(house: House) -> None:
    for name, node in (("first", "m"), ("alias", "m"), ("n", "n"), ("first", "m")):
        answer = await house.complete(name)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-kvferry-route"].startswith(f"prefill=p-{node} decode=d-{node}")
        assert answer.json()["model"] == ("first" if node == "m" else "n")
    assert [len(house[f"p-{node}"].prefills) for node in "mn"] == [3, 1]
    for name, tokens in (("first", 12), ("n", 4)):
        assert house.metrics.registry.get_sample_value("kvferry_output_tokens_total", {"model_name": name}) == tokens
    streamed = await house.complete("n", stream=True)
    assert events(streamed)[0]["model"] == "n"


async def test_all_names_are_listed_with_the_limits_of_their_nodes(house: House) -> None:
    listed = (await house.http.get("/v1/models")).json()["data"]
    assert [(card["id"], card["root"], card["max_model_len"]) for card in listed] == [
        ("first", "m", 300),
        ("alias", "m", 300),
        ("n", "n", 200),
    ]
    assert (await house.http.get("/v1/models/alias")).json() == listed[1]
    assert (await house.http.get("/v1/models/m")).status_code == 404


async def test_an_unknown_model_is_not_there_and_the_answer_names_those_that_are(house: House) -> None:
    answer = await house.complete("m")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")
    assert "'first', 'alias', 'n'" in error_of(answer)["message"]


async def test_limits_are_those_of_the_model(house: House) -> None:
    assert (await house.complete("first", max_tokens=250)).status_code == 200
    error = error_of(await house.complete("n", max_tokens=250))
    assert "200 tokens" in error["message"]
    counted = await house.http.post("/tokenize", json={"model": "n", "prompt": "one two"})
    assert counted.json()["max_model_len"] == 200
    assert (await house.http.post("/detokenize", json={"model": "o", "tokens": [1]})).status_code == 404


async def test_a_model_that_loses_its_nodes_is_refused_by_name_while_the_other_runs_on(house: House) -> None:
    running = asyncio.create_task(house.complete("first", max_tokens=200))
    await until(lambda: house["d-m"].running == 1)
    for node in ("p-n", "d-n"):
        house[node].crash()
        await house.store.withdraw(node, 1)
    await until(lambda: not house.other.usable("decode"))
    refused = await house.complete("n")
    assert (refused.status_code, error_of(refused)["code"]) == (503, "no_nodes")
    assert "'n'" in error_of(refused)["message"]
    assert int(refused.headers["retry-after"]) >= 1
    answer = await running
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 200)
    assert [card["id"] for card in (await house.http.get("/v1/models")).json()["data"]] == ["first", "alias", "n"]
    ready = await house.http.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["models"] == {"first": {"prefill": 1, "decode": 1}, "n": {"prefill": 0, "decode": 0}}
    back = decode("d-n", epoch=2, changes=of("n"))
    await house.add(back)
    await until(lambda: bool(house.other.usable("decode")))
    assert (await house.complete("n")).status_code == 200


async def test_equal_prompts_of_two_models_have_different_blocks(house: House) -> None:
    """Also where the index says that a node of the other model holds them all."""
    await house.complete("first", prompt="x " * 40)
    asked: list[set[str]] = []
    index = house.store.longest_prefix

    async def spy(hashes: Sequence[bytes], nodes: Mapping[str, int]) -> dict[str, int]:
        asked.append({owner(name) for name in nodes})
        return {**(await index(hashes, nodes)), "p-m": len(hashes)}

    house.store.longest_prefix = spy  # type: ignore[method-assign]
    answer = await house.complete("n", prompt="x " * 40)
    assert asked == [{"p-n", "d-n"}]
    assert "prefill=p-n decode=d-n" in answer.headers["x-kvferry-route"]

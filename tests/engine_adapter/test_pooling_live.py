"""A mock engine that embeds, with its adapter, behind a router: embeddings, scores and ranks as clients see them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import httpx
import pytest

from tests.engine_adapter.fleet import Fleet, fleet
from tests.engine_adapter.mock_pooling import toy_vector
from tests.engine_adapter.mock_tokenizer import encoded
from tests.local_cluster import scrape, value

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with fleet() as made:
        made.add("tests.engine_adapter.mock_vllm", "vllm", "--engine-pooling", "last", pools="embed", events=False)
        made.start_router("smollm2")
        made.ready(1)
        yield made


def unit(text: str) -> list[float]:
    vector = toy_vector(encoded(text))
    return [each / math.hypot(*vector) for each in vector]


def test_embeddings_are_those_of_the_engine(running: Fleet):
    body = {"model": "toy", "input": ["a tree", encoded("a house")]}
    told = httpx.post(f"{running.router_url}/v1/embeddings", json=body, timeout=30).json()
    assert [each["embedding"] for each in told["data"]] == [
        pytest.approx(unit(text), abs=1e-6) for text in ("a tree", "a house")
    ]
    assert told["usage"]["prompt_tokens"] == len(encoded("a tree")) + len(encoded("a house"))


def test_ranks_are_cosines_of_the_engines_vectors(running: Fleet):
    documents = ["a tree", "a house", "a very old song"]
    body = {"model": "toy", "query": "wood", "documents": documents}
    told = httpx.post(f"{running.router_url}/v1/rerank", json=body, timeout=30).json()
    due = {text: sum(a * b for a, b in zip(unit("wood"), unit(text), strict=True)) for text in documents}
    found = [(each["document"]["text"], each["relevance_score"]) for each in told["results"]]
    assert [text for text, _ in found] == sorted(documents, key=lambda text: -due[text])
    assert dict(found) == pytest.approx(due, abs=1e-5)


def test_generation_is_refused_and_the_lease_tells_what_the_engine_does(running: Fleet):
    body = {"model": "toy", "prompt": "a", "max_tokens": 2}
    told = httpx.post(f"{running.router_url}/v1/completions", json=body, timeout=30)
    assert told.status_code >= 400
    (engine,) = running.engines
    metrics = scrape(engine.adapter_url)
    assert value(metrics, "kvferry_engine_guarantee", guarantee="embeds") == 1
    assert value(metrics, "kvferry_engine_guarantee", guarantee="classifies") == 0

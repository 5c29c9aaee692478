"""Score, rerank and classify: by a head over pairs or by cosines, in the shapes of vLLM, Jina and Cohere."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest

from kvferry.model_files.pooling_config import PoolingConfig
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.work import Classify, Embed
from kvferry.router.dispatch.interface import Output, RequestSpec
from tests.api_parts import Api, FakeCluster, demo_text, error_of, ids_of

CROSS = PoolingConfig("classify", encoder=True, labels=("LABEL_0",), activation="sigmoid", typed=True)
MOODS = PoolingConfig("classify", encoder=True, labels=("sad", "glad", "mad"), activation="softmax")
VECTORS = {"sun": (1.0, 0.0), "sunny": (0.8, 0.6), "rain": (0.0, 1.0)}


def packed(*numbers: float) -> list[Output | KvferryError]:
    return [Output((), finish_reason="stop", vector=struct.pack(f"<{len(numbers)}f", *numbers))]


def embeds(spec: RequestSpec) -> list[Output | KvferryError]:
    assert spec.work == Embed("last", True, 0)
    return packed(*next(vector for text, vector in VECTORS.items() if tuple(ids_of(text)) == spec.token_ids))


def length_as_logit(spec: RequestSpec) -> list[Output | KvferryError]:
    return packed(len(spec.token_ids) / 10)


def api_of(script: Any, task: PoolingConfig | None = None) -> Api:
    return Api(FakeCluster(script), demo_text() if task is None else replace(demo_text(), task=task))


async def post(api: Api, path: str, **body: Any) -> dict[str, Any]:
    answer = await api.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
async def test_cosines_where_there_is_no_head_each_text_embedded_once(path: str) -> None:
    api = api_of(embeds)
    body = await post(api, path, text_1="sun", text_2=["sun", "sunny", "rain", "rain"])
    assert [item["score"] for item in body["data"]] == pytest.approx([1.0, 0.8, 0.0, 0.0])
    assert [item["index"] for item in body["data"]] == [0, 1, 2, 3]
    assert len(api.cluster.dispatches) == 3
    assert body["usage"]["prompt_tokens"] == sum(len(ids_of(text)) for text in VECTORS)


async def test_pairs_of_two_lists_and_the_other_names_of_the_fields() -> None:
    body = await post(api_of(embeds), "/v1/score", queries=["sun", "rain"], documents=["sunny", "sunny"])
    assert [item["score"] for item in body["data"]] == pytest.approx([0.8, 0.6])


async def test_a_cross_encoder_reads_each_pair_as_one() -> None:
    api = api_of(length_as_logit, CROSS)
    body = await post(api, "/v1/score", text_1="one", text_2=["two", "two three four"])
    wanted = []
    for dispatch, second in zip(api.cluster.dispatches, ("two", "two three four"), strict=True):
        ids, begins = demo_text().encode_pair("one", second)
        assert list(dispatch.spec.token_ids) == ids
        assert dispatch.spec.work == Classify(begins)
        assert begins == len(ids_of("one"))
        wanted.append(1 / (1 + math.exp(-len(ids) / 10)))
    assert [item["score"] for item in body["data"]] == pytest.approx(wanted)


async def test_without_token_types_no_boundary_travels() -> None:
    api = api_of(length_as_logit, replace(CROSS, typed=False, activation="none"))
    body = await post(api, "/v1/score", text_1="one", text_2="two")
    assert api.cluster.dispatches[0].spec.work == Classify(0)
    assert body["data"][0]["score"] == pytest.approx(len(api.cluster.dispatches[0].spec.token_ids) / 10)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_in_the_order_of_their_relevance(path: str) -> None:
    documents = ["rain", {"text": "sun"}, "sunny"]
    body = await post(api_of(embeds), path, query="sun", documents=documents, top_n=2)
    assert [(item["index"], item["document"]["text"]) for item in body["results"]] == [(1, "sun"), (2, "sunny")]
    assert [item["relevance_score"] for item in body["results"]] == pytest.approx([1.0, 0.8])
    bare = await post(api_of(embeds), path, query="sun", documents=documents, return_documents=False)
    assert [item.keys() for item in bare["results"]] == [{"index", "relevance_score"}] * 3


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
async def test_a_classifier_names_the_likeliest_label(path: str) -> None:
    api = api_of(lambda spec: packed(0.0, math.log(3), 0.0), MOODS)
    body = await post(api, path, input=["fine", [4, 5]])
    assert [dispatch.spec.work for dispatch in api.cluster.dispatches] == [Classify(), Classify()]
    for item in body["data"]:
        assert item["label"] == "glad"
        assert item["probs"] == pytest.approx([0.2, 0.6, 0.2])
        assert item["num_classes"] == 3


async def test_labels_that_exclude_nothing_have_probabilities_of_their_own() -> None:
    api = api_of(lambda spec: packed(0.0, math.log(3), -800.0), replace(MOODS, activation="sigmoid"))
    body = await post(api, "/v1/classify", input="fine")
    assert body["data"][0]["probs"] == pytest.approx([0.5, 0.75, 0.0])


@pytest.mark.parametrize(
    ("task", "path", "body", "words"),
    [
        (None, "/v1/classify", {"input": "a"}, "does not classify: it is a decoder"),
        (MOODS, "/v1/score", {"text_1": "a", "text_2": "b"}, "does not score pairs: it is an encoder with a head of 3"),
        (MOODS, "/v1/rerank", {"query": "a", "documents": ["b"]}, "does not score pairs"),
    ],
)
async def test_a_model_that_cannot_says_what_it_is(
    task: PoolingConfig | None, path: str, body: Any, words: str
) -> None:
    api = api_of(embeds, task)
    answer = await api.http.post(path, json=body)
    assert answer.status_code == 400
    assert words in error_of(answer)["message"]
    assert error_of(answer)["param"] == "model"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/score", {}, "queries"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": "c"}, "text_1"),
        ("/v1/score", {"text_1": 3, "text_2": "c"}, "text_1"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/classify", {"input": 3}, "input"),
    ],
)
async def test_a_mistake_names_its_field(path: str, body: Any, field: str) -> None:
    answer = await api_of(embeds).http.post(path, json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field


async def test_truncation_cuts_the_document_and_never_all_of_it() -> None:
    api = api_of(length_as_logit, CROSS)
    await post(api, "/v1/score", text_1="one two", text_2="three four five six", truncate_prompt_tokens=4)
    ids, _ = demo_text().encode_pair("one two", "three four five six")
    assert api.cluster.dispatches[0].spec.token_ids == tuple(ids[:4])
    answer = await api.http.post(
        "/v1/score", json={"text_1": "one two", "text_2": "three", "truncate_prompt_tokens": 2}
    )
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "truncate_prompt_tokens"

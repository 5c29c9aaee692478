"""Embeddings, scores and classes through whole clusters: decoders beside their streams, encoders alone."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from kvferry.engine.models.hf import transformers_module
from kvferry.protocol.settings import RouterSettings
from kvferry.router.text.loader import load_text_model
from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, streams_running, value
from tests.transformers_demo import load_demo
from tests.wordpiece import VOCAB_SIZE, save_wordpiece

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TEXTS = ("The sun rises in the east.", "Rain falls mainly on the plain " * 20, "1, 2, 3", "Une phrase en français")
BERT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@cache
def demo_vectors() -> list[np.ndarray]:
    """transformers' hidden state of each text's last token, float32."""
    text, model = load_text_model(RouterSettings()), load_demo(transformers_module().AutoModelForCausalLM).model
    with torch.inference_mode():
        return [np.asarray(model(input_ids=torch.tensor([text.encode(t)])).last_hidden_state[0, -1]) for t in TEXTS]


def embed(cluster: LocalCluster, model: str, texts: Any, **extra: Any) -> tuple[np.ndarray, Any]:
    made = cluster.client.embeddings.create(model=model, input=texts, **extra)
    return np.array([item.embedding for item in made.data]), made


def post(cluster: LocalCluster, path: str, **body: Any) -> httpx.Response:
    return httpx.post(cluster.url + path, json=body, timeout=60)


@pytest.mark.parametrize("prefill", [1, 0])
def test_the_demo_model_s_last_token(prefill: int) -> None:
    with local_cluster("--prefill", str(prefill), "--kv-blocks", "600", "--threads", "1") as cluster:
        with streams_running(cluster, MODEL, 2):
            found, made = embed(cluster, MODEL, list(TEXTS))
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-4)
        for vector, wanted in zip(found, demo_vectors(), strict=True):
            assert vector @ wanted / np.linalg.norm(wanted) > 0.999
        again, made = embed(cluster, MODEL, TEXTS[1], dimensions=64)
        cut = demo_vectors()[1][:64]
        assert again[0] @ cut / np.linalg.norm(cut) > 0.999
        details = made.usage.prompt_tokens_details
        assert details["cached_tokens"] >= 64, "the prefix that the first one computed"
        route = post(cluster, "/v1/embeddings", input="Where?").headers["x-kvferry-route"]
        assert ("prefill=none" in route) == (prefill == 0)
        assert ("decode=none" in route) == (prefill == 1)
        ranked = post(cluster, "/v1/rerank", query=TEXTS[0], documents=[TEXTS[2], TEXTS[0]]).json()["results"]
        assert ranked[0]["index"] == 1
        assert ranked[0]["relevance_score"] == pytest.approx(1.0, abs=1e-3)
        refused = post(cluster, "/v1/classify", input="a")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        for url in cluster.worker_urls("prefill" if prefill else "decode"):
            assert value(scrape(url), "kvferry_account_violations_total") == 0
        cluster.settle()


def save_bert(path: Path, kind: str, **settings: Any) -> Path:
    transformers = transformers_module()
    torch.manual_seed(3)
    getattr(transformers, kind)(transformers.BertConfig(**(BERT | settings))).save_pretrained(save_wordpiece(path))
    return path


@torch.inference_mode()
def alone(path: Path, kind: str, *texts: str) -> Any:
    """transformers' own answer to one text or pair, in float32."""
    text = load_text_model(RouterSettings(model=(str(path),)))
    ids, second = (text.encode(*texts), 0) if len(texts) == 1 else text.encode_pair(*texts)
    types = [[int(bool(second) and at >= second) for at in range(len(ids))]]
    model = getattr(transformers_module(), kind).from_pretrained(path, dtype=torch.float32).eval()
    return model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor(types))


def test_an_encoder_embeds_and_generates_nothing(tmp_path: Path) -> None:
    path = save_bert(tmp_path / "tiny", "BertModel")
    arguments = ("--model", str(path), "--prefill", "0", "--dtype", "float32", "--threads", "1")
    with local_cluster(*arguments) as cluster:
        texts = ["a word", "many words in a row", "b"] * 30
        found, made = embed(cluster, "tiny", texts)
        for vector, text in zip(found[:3], texts, strict=False):
            wanted = alone(path, "BertModel", text).last_hidden_state[0].mean(0)
            np.testing.assert_allclose(vector, wanted / wanted.norm(), atol=1e-4)
        np.testing.assert_allclose(found, np.tile(found[:3], (30, 1)), atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="does not generate"):
            cluster.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
        with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens"):
            embed(cluster, "tiny", "a " * 100)
        _, made = embed(cluster, "tiny", "a " * 100, extra_body={"truncate_prompt_tokens": -1})
        assert made.usage.prompt_tokens == 64  # type: ignore[union-attr]
        cluster.settle()


def test_a_cross_encoder_reranks(tmp_path: Path) -> None:
    kind = "BertForSequenceClassification"
    path = save_bert(tmp_path / "cross", kind, num_labels=1)
    with local_cluster("--model", str(path), "--dtype", "float32", "--threads", "1") as cluster:
        documents = ["a word", "the sun", "many words in a row"]
        ranked = post(cluster, "/v1/rerank", query="what", documents=documents).json()["results"]
        for item in ranked:
            wanted = torch.sigmoid(alone(path, kind, "what", documents[item["index"]]).logits[0, 0]).item()
            assert item["relevance_score"] == pytest.approx(wanted, abs=1e-5)
        scores = [item["relevance_score"] for item in ranked]
        assert scores == sorted(scores, reverse=True)
        scored = post(cluster, "/v1/score", text_1="what", text_2=documents).json()["data"]
        assert sorted((item["score"] for item in scored), reverse=True) == pytest.approx(scores, abs=1e-5)
        refused = post(cluster, "/v1/embeddings", input="a")
        assert refused.status_code == 400
        assert "head of 1 label" in refused.json()["error"]["message"]
        cluster.settle()

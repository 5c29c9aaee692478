"""A model with recurrent layers through a whole cluster: prompts shipped with their state, streams that outlive their
node, prompts reused from checkpoints; always transformers' own float32 tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.tiny_checkpoints import VOCAB, greedy, save_checkpoint
from tests.local_cluster import LocalCluster, local_cluster, scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LINEAR = {
    "family": "Qwen3_5TextConfig",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("models") / "hybrid", **LINEAR)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[LocalCluster]:
    arguments = ("--dtype", "float32", "--kv-blocks", "2000", "--threads", "1", "--prefill", "1", "--decode", "2")
    with local_cluster("--model", str(model), *arguments, forked=False) as running:
        yield running


def prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(3, VOCAB), k=length)


def complete(cluster: LocalCluster, tokens: list[int], count: int, **more: Any) -> tuple[list[int], dict[str, Any]]:
    body = {"model": "hybrid", "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{cluster.url}/v1/completions", json=body | {"return_token_ids": True} | more, timeout=120
    ).json()
    assert "error" not in answer, answer
    return answer["choices"][0]["token_ids"], answer["usage"]


def stream(cluster: LocalCluster, tokens: list[int], count: int, on_token: Callable[[int, str], None]) -> list[int]:
    """Token ids of a stream; `on_token(how many so far, the decode node)` is called after each chunk."""
    body = {"model": "hybrid", "prompt": tokens, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    made: list[int] = []
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200
        route = response.headers["x-kvferry-route"]
        node = next(word for word in route.split() if word.startswith("decode=")).removeprefix("decode=")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                made += chunk["choices"][0].get("token_ids") or []
                on_token(len(made), node)
    return made


def test_transformers_tokens_shipped_and_reused(cluster: LocalCluster, model: Path) -> None:
    wanted = greedy(model, [prompt(length) for length in (21, 150, 333)])
    for answer in wanted:
        tokens, _ = complete(cluster, list(answer.prompt), len(answer.tokens))
        answer.check(tokens, "first")  # type: ignore[attr-defined]
    for answer in wanted[1:]:
        tokens, usage = complete(cluster, list(answer.prompt), len(answer.tokens))
        answer.check(tokens, "reused")  # type: ignore[attr-defined]
        assert usage["prompt_tokens_details"]["cached_tokens"] == (len(answer.prompt) - 1) // 16 * 16
    cluster.settle()


def test_a_killed_decode_node_costs_no_token(cluster: LocalCluster) -> None:
    undisturbed, _ = complete(cluster, prompt(120), 80)
    killed: list[str] = []

    def kill(made: int, node: str) -> None:
        if made >= 30 and not killed:
            killed.append(node)
            cluster.worker(node).kill()

    assert stream(cluster, prompt(120), 80, kill) == undisturbed
    assert killed
    wait_for(lambda: value(scrape(cluster.url), "kvferry_nodes", role="decode", state="ready") == 2, 60)
    cluster.settle()


def test_choices_of_one_prompt_are_those_of_single_requests(cluster: LocalCluster) -> None:
    text = prompt(90)
    body = {"model": "hybrid", "prompt": text, "max_tokens": 12, "n": 3, "seed": 5, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=120).json()
    again = httpx.post(f"{cluster.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=120).json()
    choices = [choice["token_ids"] for choice in answer["choices"]]
    assert choices == [choice["token_ids"] for choice in again["choices"]]
    assert len({tuple(each) for each in choices}) == 3
    cluster.settle()

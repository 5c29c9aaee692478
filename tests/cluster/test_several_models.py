"""Two models in one cluster, from the command line to the client: nothing of one is ever the other's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.cluster.tiny_checkpoints import VOCAB, greedy, save_checkpoint
from tests.local_cluster import LocalCluster, local_cluster
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ARGUMENTS = ("--dtype", "float32", "--kv-blocks", "200", "--threads", "1")
NAMES = ("--served-model-name", "llama,tiny", "--served-model-name", "gpt")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return (
        save_checkpoint(folder / "one" / "ckpt", "LlamaConfig"),
        save_checkpoint(folder / "two" / "ckpt", "GPT2Config", n_embd=64, n_layer=3, n_head=4, n_positions=512),
    )


@pytest.fixture(scope="module")
def cluster(paths: tuple[Path, Path]) -> Iterator[LocalCluster]:
    """Both checkpoints have one directory name: served names alone tell them apart."""
    models = [word for path in paths for word in ("--model", str(path))]
    with local_cluster(*models, *NAMES, *ARGUMENTS) as cluster:
        yield cluster


def ask(cluster: LocalCluster, model: str, prompt: tuple[int, ...]) -> openai.types.Completion:
    extra = {"ignore_eos": True, "return_token_ids": True}
    return cluster.client.completions.create(
        model=model, prompt=list(prompt), max_tokens=16, temperature=0, extra_body=extra
    )


def test_each_model_answers_with_its_own_tokens_and_reuses_its_own_blocks(
    cluster: LocalCluster, paths: tuple[Path, Path]
) -> None:
    prompts = [random.Random(count).choices(range(3, VOCAB), k=count) for count in (40, 200)]
    wanted = {name: greedy(path, prompts) for name, path in zip(("llama", "gpt"), paths, strict=True)}
    assert {card.id for card in cluster.client.models.list()} == {"llama", "tiny", "gpt"}
    assert len({lease.fingerprint for lease in cluster.leases()}) == 2
    for again in (False, True):
        for name in ("llama", "gpt"):
            for answer in wanted[name]:
                made = ask(cluster, name, answer.prompt)
                answer.check(made.choices[0].token_ids, name)  # type: ignore[attr-defined]
                assert made.usage is not None
                assert made.usage.prompt_tokens_details is not None
                cached = (len(answer.prompt) - 1) // 16 * 16 if again else 0
                assert made.usage.prompt_tokens_details.cached_tokens == cached, (name, again)
    chat = cluster.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert chat.model == "llama"
    cluster.settle()


def test_a_router_that_starts_anew_finds_both(cluster: LocalCluster) -> None:
    (router,) = [child for child in cluster.children("router") if "--served-model-name" in child.cmdline()]
    router.kill()
    everyone = {"llama": {"prefill": 1, "decode": 1}, "gpt": {"prefill": 1, "decode": 1}}
    wait_for(lambda: ready(cluster) == everyone, 60)
    for name in ("llama", "gpt"):
        assert ask(cluster, name, tuple(range(10, 60))).choices[0].finish_reason == "length"


def test_a_model_without_nodes_says_so_and_the_other_does_not_notice(cluster: LocalCluster) -> None:
    gone = [cluster.worker(node) for node in ("prefill-1", "decode-1")]
    for process in gone:
        process.suspend()
    try:
        wait_for(
            lambda: ready(cluster) == {"llama": {"prefill": 1, "decode": 1}, "gpt": {"prefill": 0, "decode": 0}}, 30
        )
        body = {"model": "gpt", "prompt": [5, 6, 7], "max_tokens": 4}
        refused = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "'gpt' has no decode node" in refused.json()["error"]["message"]
        assert ask(cluster, "llama", tuple(range(10, 60))).choices[0].finish_reason == "length"
        assert httpx.get(f"{cluster.url}/ready?nodes=1", timeout=10).status_code == 200
        assert {card.id for card in cluster.client.models.list()} == {"llama", "tiny", "gpt"}
    finally:
        for process in gone:
            process.kill()
    wait_for(lambda: (ready(cluster) or {}).get("gpt") == {"prefill": 1, "decode": 1}, 60)
    assert ask(cluster, "gpt", tuple(range(10, 60))).choices[0].finish_reason == "length"
    cluster.settle()


def ready(cluster: LocalCluster) -> dict[str, dict[str, int]] | None:
    """Nodes by model; None while the router does not answer."""
    try:
        models: dict[str, dict[str, int]] = httpx.get(f"{cluster.url}/ready", timeout=5).json()["models"]
    except httpx.TransportError:
        return None
    return models

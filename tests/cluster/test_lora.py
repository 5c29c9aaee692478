"""Adapters in a real cluster: tokens of merged weights, alone and beside others, loaded and unloaded as it runs."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.adapter_files import merge, save_adapter
from tests.cluster.oracle import Answer, answer_of
from tests.cluster.tiny_checkpoints import VOCAB, float32_model, save_checkpoint
from tests.local_cluster import LocalCluster, local_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PROMPTS = [random.Random(count).choices(range(3, VOCAB), k=count) for count in (20, 100, 300)]
LONG = 1900
"""Tokens of a stream that still runs when another call has been answered, on any machine."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, and two adapters of it."""
    folder = tmp_path_factory.mktemp("lora")
    base = save_checkpoint(folder / "base", "LlamaConfig", max_position_embeddings=2048)
    model = float32_model(base)
    adapters = {name: save_adapter(folder / name, model, seed=seed) for seed, name in enumerate(("x", "y"))}
    return {"base": base, **adapters}


@pytest.fixture(scope="module")
def wanted(paths: dict[str, Path]) -> dict[str, list[Answer]]:
    models = {name: float32_model(paths["base"]) for name in paths}
    for name in ("x", "y"):
        merge(models[name], paths[name])
    return {name: [answer_of(model, tuple(prompt)) for prompt in PROMPTS] for name, model in models.items()}


@pytest.fixture(scope="module")
def cluster(paths: dict[str, Path]) -> Iterator[LocalCluster]:
    arguments = ("--dtype", "float32", "--kv-blocks", "600", "--threads", "1", "--allow-lora-updates")
    with local_cluster("--model", str(paths["base"]), "--lora", f"x={paths['x']}", *arguments) as cluster:
        yield cluster


def ask(cluster: LocalCluster, model: str, prompt: tuple[int, ...], max_tokens: int = 16) -> openai.types.Completion:
    extra = {"ignore_eos": True, "return_token_ids": True}
    return cluster.client.completions.create(
        model=model, prompt=list(prompt), max_tokens=max_tokens, temperature=0, extra_body=extra
    )


def change(cluster: LocalCluster, what: str, **body: str) -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/{what}_lora_adapter", json=body, timeout=60)


def test_each_name_has_its_own_tokens_at_once_and_from_its_own_cache(
    cluster: LocalCluster, paths: dict[str, Path], wanted: dict[str, list[Answer]]
) -> None:
    assert change(cluster, "load", lora_name="y", lora_path=str(paths["y"])).status_code == 200
    cards = {card.id: card for card in cluster.client.models.list()}
    assert cards.keys() == {"base", "x", "y"}
    assert cards["y"].model_dump()["parent"] == "base"
    asked = [(name, answer) for answer in range(len(PROMPTS)) for name in wanted]
    for again in (False, True):
        with ThreadPoolExecutor(len(asked)) as pool:
            made = list(pool.map(lambda each: ask(cluster, each[0], wanted[each[0]][each[1]].prompt), asked))
        for (name, number), completion in zip(asked, made, strict=True):
            wanted[name][number].check(completion.choices[0].token_ids, name)  # type: ignore[attr-defined]
            assert completion.model == name
            assert completion.usage is not None
            assert completion.usage.prompt_tokens_details is not None
            cached = (len(PROMPTS[number]) - 1) // 16 * 16 if again else 0
            assert completion.usage.prompt_tokens_details.cached_tokens == cached, (name, number, again)
    cluster.settle()


def test_what_runs_ends_with_an_adapter_that_is_unloaded(
    cluster: LocalCluster, paths: dict[str, Path], wanted: dict[str, list[Answer]]
) -> None:
    change(cluster, "load", lora_name="y", lora_path=str(paths["y"]))
    whole = ask(cluster, "y", tuple(PROMPTS[1]), LONG).choices[0].token_ids  # type: ignore[attr-defined]
    begun, tokens = threading.Event(), []

    def stream() -> None:
        extra = {"ignore_eos": True, "return_token_ids": True}
        chunks = cluster.client.completions.create(
            model="y", prompt=PROMPTS[1], max_tokens=LONG, temperature=0, stream=True, extra_body=extra
        )
        for chunk in chunks:
            tokens.extend(chunk.choices[0].token_ids)  # type: ignore[attr-defined]
            begun.set()

    running = threading.Thread(target=stream)
    running.start()
    assert begun.wait(30)
    assert change(cluster, "unload", lora_name="y").status_code == 200
    assert len(tokens) < LONG, "it must still run"
    with pytest.raises(openai.NotFoundError, match="'base', 'x'"):
        ask(cluster, "y", (5, 6, 7))
    wanted["x"][0].check(ask(cluster, "x", wanted["x"][0].prompt).choices[0].token_ids, "x")  # type: ignore[attr-defined]
    running.join(60)
    assert tokens == whole
    cluster.settle()


def test_what_does_not_fit_is_refused_by_name_and_nothing_changes(
    cluster: LocalCluster, paths: dict[str, Path], tmp_path: Path
) -> None:
    other = float32_model(save_checkpoint(tmp_path / "other", "LlamaConfig", hidden_size=128))
    refused = change(cluster, "load", lora_name="z", lora_path=str(save_adapter(tmp_path / "z", other)))
    assert refused.status_code == 400
    assert "base needs" in refused.json()["error"]["message"]
    assert change(cluster, "load", lora_name="z", lora_path="/no/such/adapter").status_code == 400
    assert {card.id for card in cluster.client.models.list()} == {"base", "x"}

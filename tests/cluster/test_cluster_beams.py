"""Beam search on real nodes against transformers' own, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import httpx
import pytest
import torch

from tests.cluster.oracle import prompts
from tests.crowded import crowded
from tests.local_cluster import MODEL, LocalCluster, local_cluster, scrape, value
from tests.transformers_demo import load_demo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WIDTH, LENGTH = 3, 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster("--dtype", "float32") as cluster:
        yield cluster
        cluster.settle()


@torch.inference_mode()
def theirs(chosen: list[tuple[int, ...]]) -> list[list[list[int]]]:
    """The best beams of transformers. Without a length penalty nothing depends on whether a length counts the prompt,
    as vLLM and we have it, or leaves it out, as transformers does."""
    model = load_demo()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in chosen:
        made: Any = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=WIDTH,
            num_return_sequences=WIDTH,
            max_new_tokens=LENGTH,
            do_sample=False,
            length_penalty=0.0,
            pad_token_id=0,
        )
        found.append([beam[len(prompt) :].tolist() for beam in made])
    return found


def test_the_beams_are_those_of_transformers_and_share_their_prompt(cluster: LocalCluster) -> None:
    chosen = [prompt for prompt in prompts() if 20 <= len(prompt) <= 120][:3]
    urls = [*cluster.worker_urls("prefill"), *cluster.worker_urls("decode")]

    def computed() -> float:
        return sum(value(scrape(url), "kvferry_step_tokens_total", phase="prefill") for url in urls)

    salt = uuid4().hex  # nothing is cached when the test is tried again
    for prompt, wanted in zip(chosen, theirs(chosen), strict=True):
        before = computed()
        body = {
            "model": MODEL, "prompt": list(prompt), "use_beam_search": True, "n": WIDTH, "max_tokens": LENGTH,
            "length_penalty": 0.0, "ignore_eos": True, "return_token_ids": True,
            "cache_salt": salt,
        }  # fmt: skip
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert [choice["token_ids"] for choice in answer.json()["choices"]] == wanted
        cluster.settle()
        more = computed() - before - len(prompt) - WIDTH * (LENGTH - 1)
        assert more == 0 or (more > 0 and crowded()), "late beams have second attempts"

"""Models other than the demo, through a whole cluster: transformers' own float32 tokens over the disaggregated path."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.tiny_checkpoints import VOCAB, greedy, save_checkpoint
from tests.local_cluster import local_cluster, scrape, streams_running, value
from tests.paced_steps import PROMPTS_MATTER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3-sharded": {"family": "LlamaConfig", "rope_parameters": LLAMA3, "shard_size": "200KB"},
    "gpt2": {"family": "GPT2Config", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_and_chat(name: str, tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / name, **FAMILIES[name])
    assert (len(list(path.glob("*.safetensors"))) > 1) == name.endswith("sharded")
    prompts = [random.Random(count).choices(range(3, VOCAB), k=count) for count in (21, 150, 400)]
    wanted = greedy(path, prompts)
    # More blocks than all streams fill while the test runs, however slow the machine: no prompt's are evicted.
    arguments = ("--dtype", "float32", "--kv-blocks", "2000", "--threads", "1")
    with local_cluster("--model", str(path), *arguments, **PROMPTS_MATTER) as cluster:

        def ask(prompt: tuple[int, ...]) -> openai.types.Completion:
            extra = {"ignore_eos": True, "return_token_ids": True}
            return cluster.client.completions.create(
                model=name, prompt=list(prompt), max_tokens=16, temperature=0, extra_body=extra
            )

        with streams_running(cluster, name, 8):
            for answer in wanted:
                answer.check(ask(answer.prompt).choices[0].token_ids, "disaggregated")  # type: ignore[attr-defined]
        assert value(scrape(cluster.url), "kvferry_placements_total", kind="remote") >= 1
        for answer in wanted:
            again = ask(answer.prompt)
            answer.check(again.choices[0].token_ids, "reused")  # type: ignore[attr-defined]
            assert again.usage is not None
            assert again.usage.prompt_tokens_details is not None
            assert again.usage.prompt_tokens_details.cached_tokens == (len(answer.prompt) - 1) // 16 * 16
        chat = cluster.client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Count to 3, é!"}], max_tokens=8, temperature=0
        )
        assert chat.usage is not None
        assert chat.usage.prompt_tokens > 10
        assert chat.choices[0].finish_reason in ("stop", "length")
        cluster.settle()

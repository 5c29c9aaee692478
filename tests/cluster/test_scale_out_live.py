"""The demo model's decode node as another router's engine: the same tokens as through kvferry's own router."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.local_cluster import LocalCluster, local_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KEY = "key of the other router"
FLAGS = ("--prefill", "0", "--enable-scale-out", "--vllm-metrics", "--dtype", "float32", "--kv-blocks", "200")
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 1234, "max_tokens": 24}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """One decode node behind a router, and open to other routers."""
    with local_cluster(*FLAGS, env={"KVFERRY_SCALE_OUT_API_KEY": KEY}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def node(cluster: LocalCluster) -> Iterator[httpx.Client]:
    """Another router's client of the node."""
    (lease,) = cluster.leases()
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=lease.http_url, headers=headers, trust_env=False, timeout=60) as client:
        yield client


def tokenized(cluster: LocalCluster, text: str) -> list[int]:
    found: list[int] = httpx.post(f"{cluster.url}/tokenize", json={"prompt": text}).json()["tokens"]
    return found


def generated(node: httpx.Client, prompt: list[int], **params: Any) -> dict[str, Any]:
    answer = node.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": params})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def test_tokens_are_those_of_the_routers_answer(cluster: LocalCluster, node: httpx.Client) -> None:
    prompt = tokenized(cluster, "The history of the lighthouse begins with")
    for params in ({"temperature": 0, "max_tokens": 24}, SAMPLED):
        routed: openai.types.Completion = cluster.client.completions.create(
            model=cluster.client.models.list().data[0].id, prompt=prompt,
            extra_body={"return_token_ids": True, "ignore_eos": True}, **params,
        )  # fmt: skip
        wanted = routed.choices[0].token_ids  # type: ignore[attr-defined]
        assert len(wanted) == 24
        assert generated(node, prompt, ignore_eos=True, **params)["token_ids"] == wanted


def test_the_models_own_end_of_sequence_ends_an_answer(cluster: LocalCluster, node: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Say hi."}], "add_generation_prompt": True}
    prompt = httpx.post(f"{cluster.url}/tokenize", json=chat).json()["tokens"]
    (end,) = tokenized(cluster, "<|im_end|>")
    choice = generated(node, prompt, temperature=0, max_tokens=200)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["token_ids"][-1] == end
    assert end not in choice["token_ids"][:-1]


def test_structured_outputs_hold_and_bad_ones_are_named(cluster: LocalCluster, node: httpx.Client) -> None:
    prompt = tokenized(cluster, "A date:")
    params = {"structured_outputs": {"regex": r"[0-9]{4}-[0-9]{2}"}, "max_tokens": 30, "seed": 5}
    made = generated(node, prompt, **params)
    text = httpx.post(f"{cluster.url}/detokenize", json={"tokens": made["token_ids"]}).json()["prompt"]
    assert re.fullmatch(r"[0-9]{4}-[0-9]{2}(<\|im_end\|>|<\|endoftext\|>)?", text)
    assert made["finish_reason"] == "stop"
    params["structured_outputs"] = {"json": json.dumps({"type": "no such type"})}
    refused = node.post("/inference/v1/generate", json={"token_ids": prompt, "sampling_params": params})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "sampling_params.structured_outputs"


def test_the_key_is_on_no_command_line_and_metrics_have_vllms_names(cluster: LocalCluster, node: httpx.Client) -> None:
    (process,) = cluster.children("decode")
    assert "--enable-scale-out" in process.cmdline()
    assert KEY not in " ".join(process.cmdline())
    text = node.get("/metrics").text
    assert re.search(r'^vllm:num_requests_running\{model_name="SmolLM2-135M-Instruct"\} 0.0$', text, re.MULTILINE)
    cluster.settle()

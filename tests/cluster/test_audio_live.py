"""Audio through a whole cluster of own nodes with an encode node: transformers' own float32 tokens, whatever happens to
the nodes, and nothing encoded or computed twice without need."""

from __future__ import annotations

import base64
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.engine import tiny_audio
from tests.engine.speech.test_audio import encoded as file_of
from tests.engine.speech.test_audio import tone
from tests.engine.tiny_audio import clip, part
from tests.local_cluster import LocalCluster, local_cluster, scrape, streams_running, value
from tests.paced_steps import PROMPTS_MATTER
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

NAME = "qwen2_audio"
FLAGS = ("--dtype", "float32", "--kv-blocks", "2000", "--threads", "1")
TIE = 1e-4
"""Logits this close may be decided either way."""


@dataclass
class Hearing:
    """A cluster, and transformers' model of what it serves."""

    cluster: LocalCluster
    model: Any

    def check(self, content: Sequence[str | np.ndarray], answer: dict[str, Any]) -> None:
        """The answer is transformers' own, up to the first near tie."""
        known = list(answer["prompt_token_ids"])
        for token in answer["choices"][0]["token_ids"]:
            best = tiny_audio.oracle(NAME, self.model, content, torch.tensor(known))[-1].topk(2)
            if token != int(best.indices[0]):
                assert float(best.values[0] - best.values[1]) < TIE, (answer["choices"], len(known))
                return
            known.append(token)

    def ask(self, content: Sequence[str | np.ndarray], **more: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.post([part(each) for each in content], **more).json()
        assert "error" not in answer, answer
        return answer

    def post(self, parts: Sequence[dict[str, Any]], **more: Any) -> httpx.Response:
        return httpx.post(f"{self.cluster.url}/v1/chat/completions", json=body(parts, **more), timeout=120)

    def stream(self, content: Sequence[str | np.ndarray], **more: Any) -> Iterator[tuple[str, list[int]]]:
        """The decode node of a stream, and each chunk's tokens."""
        asked = body([part(each) for each in content], stream=True, **more)
        with httpx.stream("POST", f"{self.cluster.url}/v1/chat/completions", json=asked, timeout=120) as response:
            assert response.status_code == 200, response.read()
            route = response.headers["x-kvferry-route"]
            node = next(word for word in route.split() if word.startswith("decode=")).removeprefix("decode=")
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    yield node, chunk["choices"][0].get("token_ids") or []

    def epochs(self) -> set[tuple[str, int]]:
        """Processes of the nodes that have leases, by name and epoch."""
        return {(lease.node_id, lease.epoch) for lease in self.cluster.leases()}

    def encoded(self) -> dict[str, float]:
        """Clips that nodes have encoded so far, by role."""
        found: dict[str, float] = {}
        for lease in self.cluster.leases():
            here = value(scrape(lease.http_url), "kvferry_media_items_total", modality="audio", outcome="encoded")
            found[lease.role] = found.get(lease.role, 0.0) + here
        return found


def body(parts: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    given = {"model": NAME, "messages": [{"role": "user", "content": parts}], "max_tokens": 10, "temperature": 0}
    return given | {"ignore_eos": True, "return_token_ids": True} | more


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hearing]:
    folder = tmp_path_factory.mktemp("models") / NAME
    folder.mkdir()
    model = tiny_audio.save(NAME, folder)
    with local_cluster(
        "--model", str(folder), *FLAGS, "--prefill", "1", "--decode", "2", "--encode", "1", **PROMPTS_MATTER
    ) as running:
        yield Hearing(running, model)


NEW = itertools.count(10)
"""Seeds of clips that no node has heard, also when a test is tried again."""


def test_a_clip_is_encoded_apart_and_once(hearing: Hearing) -> None:
    clips, before = 0, Counter(hearing.encoded())
    while not (clips and value(scrape(hearing.cluster.url), "kvferry_placements_total", kind="remote")):
        clips += 1
        assert clips < 10, "none went to the prefill node, although streams keep the decode nodes busy"
        heard = clip(0.9, next(NEW))
        first = ("What do you hear in this? ", heard, " Tell me.")
        with streams_running(hearing.cluster, NAME, 4):
            answer = hearing.ask(first)
        hearing.check(first, answer)
        details = answer["usage"]["prompt_tokens_details"]
        assert details["audio_tokens"] == 22
        assert details["cached_tokens"] == 0 or clips > 1
        assert Counter(hearing.encoded()) - before == {"encode": clips}
    second = (*first, " And what not?")
    again = hearing.ask(second)
    hearing.check(second, again)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48
    elsewhere = ("Again: ", heard)
    hearing.check(elsewhere, hearing.ask(elsewhere))
    assert Counter(hearing.encoded()) - before == {"encode": clips}, "its rows are kept"
    salted = hearing.ask(first, cache_salt="another tenant's")
    assert salted["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    assert (Counter(hearing.encoded()) - before).total() == clips + 1, "tenants share no rows"
    models = httpx.get(f"{hearing.cluster.url}/v1/models").json()["data"]
    assert models[0]["input_modalities"] == ["text", "audio"]
    hearing.cluster.settle()


def test_files_and_what_is_refused(hearing: Hearing) -> None:
    mp3 = base64.b64encode(file_of("mp3", tone(0.5))).decode()
    heard = {"type": "input_audio", "input_audio": {"data": mp3, "format": "mp3"}}
    assert hearing.post([heard]).json()["usage"]["prompt_tokens_details"]["audio_tokens"] > 10
    for wrong, words, param in (
        (part(clip(1.2)), "must not be longer than 1 s", "messages[0].content[1]"),
        (part(clip(0.01)), "is too short", "messages[0].content[1]"),
        (
            heard | {"input_audio": {"data": mp3, "format": "wav"}},
            "declared as",
            "messages[0].content[1].input_audio.data",
        ),
    ):
        answer = hearing.post([part("Hi"), wrong])
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert words in error["message"]
        assert error["param"] == param


@pytest.mark.parametrize("role", ["prefill", "decode", "encode"])
def test_a_killed_node_costs_no_token(hearing: Hearing, role: str) -> None:
    """Those that compute the prompt die before it comes, the decode node in the middle of the answer."""
    content = ("Describe ", clip(0.6, len(role)), " at length.")
    undisturbed = hearing.ask(content, max_tokens=60)["choices"][0]["token_ids"]
    before, killed = hearing.epochs(), False
    if role != "decode":
        hearing.cluster.children(role)[0].kill()
        assert hearing.ask(content, max_tokens=60, cache_salt=role)["choices"][0]["token_ids"] == undisturbed
    else:
        made: list[int] = []
        for node, tokens in hearing.stream(content, max_tokens=60):
            made += tokens
            if len(made) >= 20 and not killed:
                hearing.cluster.worker(node).kill()
                killed = True
        assert (made, killed) == (undisturbed, True)
    wait_for(lambda: len(now := hearing.epochs()) == len(before) and len(now - before) == 1, 120)
    again = ("Once more: ", clip(0.5, 20 + len(role)))
    hearing.check(again, hearing.ask(again))
    hearing.cluster.settle()

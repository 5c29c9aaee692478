"""Images through a whole cluster of own nodes with real vision towers: transformers' own float32 tokens, whatever
happens to the nodes, and nothing encoded or computed twice without need."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from tests.engine import tiny_vision
from tests.local_cluster import LocalCluster, local_cluster, scrape, streams_running, value
from tests.paced_steps import PROMPTS_MATTER
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 10
OPTIONS = ("--dtype", "float32", "--kv-blocks", "2000", "--threads", "1", "--prefill", "1", "--decode", "2")
TIE = 1e-4
"""Logits this close may be decided either way."""


@dataclass
class Seeing:
    """A cluster, and transformers' model of what it serves."""

    cluster: LocalCluster
    model: Any
    name: str

    def check(self, content: Sequence[str | Image.Image], answer: dict[str, Any]) -> None:
        """The answer is transformers' own, up to the first near tie."""
        (choice,) = answer["choices"]
        known = list(answer["prompt_token_ids"])
        images = [each for each in content if not isinstance(each, str)]
        for token in choice["token_ids"]:
            logits = tiny_vision.oracle(self.name, self.model, images, torch.tensor(known))[-1]
            best = logits.topk(2)
            if token != int(best.indices[0]):
                assert float(best.values[0] - best.values[1]) < TIE, (choice["token_ids"], len(known))
                return
            known.append(token)

    def ready(self, role: str) -> float:
        """Nodes of a role that the router knows to be ready."""
        return value(scrape(self.cluster.url), "kvferry_nodes", role=role, state="ready")

    def epochs(self) -> set[tuple[str, int]]:
        """Processes of the nodes that have leases, by name and epoch."""
        return {(lease.node_id, lease.epoch) for lease in self.cluster.leases()}

    def restarted(self, before: set[tuple[str, int]]) -> None:
        """Wait until all nodes have leases again, one of them as another process than `before`."""
        wait_for(lambda: len(now := self.epochs()) == len(before) and len(now - before) == 1, 120)

    def encoded(self) -> float:
        """Images that nodes have encoded so far."""
        urls = [lease.http_url for lease in self.cluster.leases()]
        return sum(value(scrape(url), "kvferry_media_items_total", outcome="encoded") for url in urls)


def seeing(name: str, folder: Path, *more: str) -> Iterator[Seeing]:
    folder.mkdir()
    model = tiny_vision.save(name, folder)
    with local_cluster("--model", str(folder), *OPTIONS, *more, **PROMPTS_MATTER) as running:
        yield Seeing(running, model, name)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    """With rotary positions in three dimensions."""
    yield from seeing("qwen2_5_vl", tmp_path_factory.mktemp("images") / "qwen2_5_vl")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    """One node, for what is counted: placement has no choice that depends on the speed of the machine."""
    yield from seeing("qwen2_5_vl", tmp_path_factory.mktemp("node") / "qwen2_5_vl", "--prefill", "0", "--decode", "1")


def body(content: Sequence[str | Image.Image], **more: Any) -> dict[str, Any]:
    parts = [tiny_vision.part(each) for each in content]
    given = {"messages": [{"role": "user", "content": parts}], "max_tokens": TOKENS, "temperature": 0}
    return given | {"model": "any", "ignore_eos": True, "return_token_ids": True} | more


def ask(own: Seeing, content: Sequence[str | Image.Image], **more: Any) -> dict[str, Any]:
    answer = httpx.post(
        f"{own.cluster.url}/v1/chat/completions", json=body(content, **more) | {"model": own.name}, timeout=120
    ).json()
    assert "error" not in answer, answer
    found: dict[str, Any] = answer
    return found


def stream(
    own: Seeing, content: Sequence[str | Image.Image], count: int, on_token: Callable[[int, str], None]
) -> list[int]:
    """Token ids of a stream; `on_token(how many so far, the decode node)` is called after each chunk."""
    asked = body(content, max_tokens=count, stream=True) | {"model": own.name}
    made: list[int] = []
    with httpx.stream("POST", f"{own.cluster.url}/v1/chat/completions", json=asked, timeout=120) as response:
        assert response.status_code == 200, response.read()
        route = response.headers["x-kvferry-route"]
        node = next(word for word in route.split() if word.startswith("decode=")).removeprefix("decode=")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                made += chunk["choices"][0].get("token_ids") or []
                on_token(len(made), node)
    return made


def picture(seed: int) -> Image.Image:
    return tiny_vision.picture(40, 30, seed)


NEW = itertools.count(10)
"""Seeds of pictures that no node has seen, also when a test is tried again."""


@pytest.mark.parametrize(("name", "more"), [("gemma3", ()), ("qwen3_vl", ("--decode", "1", "-tp", "2"))])
def test_images_that_are_computed_whole_and_rows_on_several_ranks(
    name: str, more: Sequence[str], tmp_path: Path
) -> None:
    content = ("Compare ", picture(1), " with ", tiny_vision.picture(30, 56, 2), ", please.")
    for own in seeing(name, tmp_path / name, *more):
        with streams_running(own.cluster, name, 4):
            own.check(content, ask(own, content))
        assert value(scrape(own.cluster.url), "kvferry_placements_total", kind="remote") >= 1
        own.check(content, ask(own, content))
        own.cluster.settle()


def test_a_second_question_about_a_picture_encodes_nothing(node: Seeing) -> None:
    before, shown = node.encoded(), picture(next(NEW))
    first = ("What is in this picture? ", shown, " Tell me.")
    answer = ask(node, first)
    node.check(first, answer)
    details = answer["usage"]["prompt_tokens_details"]
    assert (details["image_tokens"], details["cached_tokens"]) == (6, 0)
    second = (*first, " And what is not?")
    again = ask(node, second)
    node.check(second, again)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert node.encoded() == before + 1
    other = ask(node, ("What is in this picture? ", picture(next(NEW)), " Tell me."))
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 32, "the text before the picture"
    salted = ask(node, first, cache_salt="another tenant's")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert salted["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    assert node.encoded() == before + 3, "tenants do not share rows"
    node.cluster.settle()


def test_choices_and_other_apis_see_the_same_picture(node: Seeing) -> None:
    shown, before = picture(next(NEW)), node.encoded()
    whole = ask(node, ("Look: ", shown), max_tokens=6)
    several = ask(node, ("Look: ", shown), n=2, temperature=1.0, seed=3, max_tokens=6)
    single = ask(node, ("Look: ", shown), temperature=1.0, seed=3, max_tokens=6)
    assert several["choices"][0]["token_ids"] == single["choices"][0]["token_ids"]
    assert several["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    url = tiny_vision.url(shown)
    messages = httpx.post(
        f"{node.cluster.url}/v1/messages", timeout=120, json={
            "model": node.name, "max_tokens": 6, "temperature": 0, "messages": [{"role": "user", "content": [
                {"type": "text", "text": "Look: "},
                {"type": "image", "source": {
                    "type": "base64", "media_type": "image/png", "data": url.split(",", 1)[1]}},
            ]}],
        },
    ).json()  # fmt: skip
    responses = httpx.post(
        f"{node.cluster.url}/v1/responses", timeout=120, json={
            "model": node.name, "max_output_tokens": 6, "temperature": 0, "input": [{"role": "user", "content": [
                {"type": "input_text", "text": "Look: "}, {"type": "input_image", "image_url": url, "detail": "auto"},
            ]}],
        },
    ).json()  # fmt: skip
    used = messages["usage"]
    given = used["input_tokens"] + used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
    assert given == responses["usage"]["input_tokens"] == whole["usage"]["prompt_tokens"]
    text = whole["choices"][0]["message"]["content"]
    assert [part["text"] for part in messages["content"]] == [text]
    assert responses["output"][0]["content"][0]["text"] == text
    assert responses["usage"]["input_tokens_details"]["image_tokens"] == 6
    assert node.encoded() == before + 1
    node.cluster.settle()


def test_killed_nodes_cost_no_token(qwen: Seeing) -> None:
    content = ("Describe ", picture(30), " at length.")
    undisturbed = ask(qwen, content, max_tokens=80)["choices"][0]["token_ids"]
    for role in ("decode", "prefill"):
        killed: list[str] = []

        def kill(made: int, node: str, role: str = role, killed: list[str] = killed) -> None:
            if made >= 30 and not killed:
                killed.append(node)
                (qwen.cluster.worker(node) if role == "decode" else qwen.cluster.children("prefill")[0]).kill()

        before = qwen.epochs()
        assert stream(qwen, content, 80, kill) == undisturbed
        assert killed
        qwen.restarted(before)
        wait_for(lambda: [qwen.ready(each) for each in ("prefill", "decode")] == [1, 2], 120)
    qwen.cluster.settle()


def test_a_drained_node_hands_its_stream_on(qwen: Seeing) -> None:
    content = ("Describe ", picture(40), " at length.")
    undisturbed = ask(qwen, content, max_tokens=120)["choices"][0]["token_ids"]
    urls = {lease.node_id: lease.http_url for lease in qwen.cluster.leases() if lease.role == "decode"}
    encoded = {node: value(scrape(url), "kvferry_media_items_total") for node, url in urls.items()}
    drained: list[str] = []

    def drain(made: int, node: str) -> None:
        if made >= 20 and not drained:
            drained.append(node)
            qwen.cluster.worker(node).send_signal(signal.SIGTERM)

    assert stream(qwen, content, 120, drain) == undisturbed
    (other,) = set(urls) - set(drained)
    assert value(scrape(urls[other]), "kvferry_media_items_total") == encoded[other], "it needs no rows to go on"

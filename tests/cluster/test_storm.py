"""Mixed requests while processes are killed, frozen and drained and Valkey dies.

Anyone who gets an answer gets the undisturbed one, anyone who does not gets a proper error, and nothing stays behind.
In float32, so that recomputing cannot change a token. Seeded, but for what the scheduler of the machine adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.cluster.tiny_checkpoints import VOCAB, save_checkpoint
from tests.local_cluster import LocalCluster, local_cluster, scrape, value
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SEED = 11
STORM_S = 14.0
CLIENTS = 12
DEEDS = (
    *(("kill", "decode"), ("freeze", "prefill"), ("kill", "valkey-server"), ("drain", "prefill")),
    *(("freeze", "decode"), ("kill", "prefill"), ("freeze", "valkey-server"), ("drain", "decode")),
)
NEAR = 1e-3
"""Log-probabilities this close may be decided either way: such prompts are not used."""
SHARED = random.Random(SEED).choices(range(3, VOCAB), k=100)

Choices = dict[int, tuple[tuple[int, ...], str, str | None]]


@dataclass
class Outcomes:
    """What the clients met. errors: (status, code); wrong: what no client may meet."""

    answered: int = 0
    left: int = 0
    errors: list[tuple[int, str]] = field(default_factory=list)
    wrong: list[object] = field(default_factory=list)


class Refused(Exception):
    """The API answered with an error object."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status}: {error}")
        assert error.keys() >= {"message", "type", "param", "code"}, error
        self.status, self.code = status, str(error["code"])


def greedy_body(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    own = rng.choices(range(3, VOCAB), k=rng.choice((10, 60, 200, 700)))
    prompt = SHARED + own if seed % 2 else own
    return {"model": "storm", "prompt": prompt, "max_tokens": 90, "temperature": 0, "return_token_ids": True}


def decided(client: httpx.Client, body: dict[str, Any]) -> bool:
    """Whether every token of the greedy answer is well ahead of the next best."""
    answer = client.post("/v1/completions", json=body | {"logprobs": 2}).json()["choices"][0]
    pairs = [sorted(top.values()) for top in answer["logprobs"]["top_logprobs"]]
    return len(pairs) > 1 and all(len(pair) > 1 and pair[-1] - pair[-2] > NEAR for pair in pairs)


def make_bodies(client: httpx.Client) -> list[dict[str, Any]]:
    """Requests of all kinds on prompts whose answers are clear."""
    greedy = [body for body in map(greedy_body, range(20)) if decided(client, body)][:8]
    assert len(greedy) == 8
    bodies = list(greedy)
    for body in greedy[:4]:
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        bodies.append(body | {"stop": [text[len(text) // 2 :][:3]]})
        bodies.append(body | {"n": 2})
        bodies.append(body | {"max_tokens": 1, "logprobs": 1})
        bodies.append(body | {"temperature": 0.9, "seed": 5, "max_tokens": 40})
    return bodies


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Choices:
    """Token ids, text and finish reason of each choice. Raises Refused."""
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise Refused(response.status_code, json.loads(await response.aread())["error"])
        if body.get("stream"):
            lines = [line async for line in response.aiter_lines() if line]
            parts = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
            if "error" in parts[-1]:
                raise Refused(200, parts[-1]["error"])
            assert lines[-1] == "data: [DONE]", lines[-1]
        else:
            parts = [json.loads(await response.aread())]
    for part in parts:
        for choice in part["choices"]:
            found[choice["index"]].append(choice)
    return {
        index: (
            tuple(token for piece in pieces for token in piece.get("token_ids") or ()),
            "".join(piece["text"] for piece in pieces),
            pieces[-1]["finish_reason"],
        )
        for index, pieces in found.items()
    }


class Storm:
    """Clients and misdeeds on one cluster, until `until` (monotonic seconds)."""

    def __init__(self, cluster: LocalCluster, bodies: list[dict[str, Any]], undisturbed: list[Choices]) -> None:
        self.outcomes = Outcomes()
        self._cluster, self._bodies, self._undisturbed = cluster, bodies, undisturbed
        self._until = time.monotonic() + STORM_S

    async def run(self, client: httpx.AsyncClient) -> None:
        await asyncio.gather(self._misdeeds(), *(self._client(client, number) for number in range(CLIENTS)))

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(SEED * 1000 + number)
        while time.monotonic() < self._until:
            which = rng.randrange(len(self._bodies))
            body = self._bodies[which] | {"stream": rng.random() < 0.6}
            if rng.random() < 0.6:
                body["cache_salt"] = str(rng.random())
            patience = rng.uniform(0.0, 1.0) if rng.random() < 0.2 else 60.0
            await self._once(client, which, body, patience)

    async def _once(self, client: httpx.AsyncClient, which: int, body: dict[str, Any], patience: float) -> None:
        try:
            async with asyncio.timeout(patience):
                answer = await ask(client, body)
        except TimeoutError:
            self.outcomes.left += 1
            if patience == 60.0:
                self.outcomes.wrong.append((which, "no answer"))
        except Refused as error:
            self.outcomes.errors.append((error.status, error.code))
            await asyncio.sleep(0.2)
        except (httpx.HTTPError, AssertionError, ValueError, KeyError) as error:
            self.outcomes.wrong.append((which, repr(error)))
        else:
            self.outcomes.answered += 1
            if answer != self._undisturbed[which]:
                self.outcomes.wrong.append((which, body.get("cache_salt"), answer, self._undisturbed[which]))

    async def _misdeeds(self) -> None:
        rng = random.Random(SEED)
        thawing = []
        for deed, whom in rng.sample(DEEDS, len(DEEDS)):
            await asyncio.sleep(STORM_S / len(DEEDS) * rng.uniform(0.6, 1.0))
            processes = self._cluster.children(whom)
            if not processes:
                continue
            process = rng.choice(processes)
            with contextlib.suppress(psutil.Error):
                if deed == "kill":
                    process.kill()
                elif deed == "drain":
                    process.terminate()
                else:
                    process.suspend()
                    thawing.append(asyncio.create_task(_thaw(process, rng.uniform(1.0, 6.0))))
        await asyncio.gather(*thawing)


async def _thaw(process: psutil.Process, seconds: float) -> None:
    await asyncio.sleep(seconds)
    with contextlib.suppress(psutil.Error):
        process.resume()


def all_ready(cluster: LocalCluster) -> bool:
    if len(cluster.children("valkey-server")) != 1:
        return False
    nodes = scrape(cluster.url)["kvferry_nodes"]
    return sum(count for labels, count in nodes if labels["state"] == "ready") == 4


def test_answers_survive_a_storm_and_nothing_stays_behind(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "storm", "LlamaConfig", max_position_embeddings=1024)
    sizes = ("--prefill", "2", "--decode", "2", "--kv-blocks", "400", "--threads", "1")
    with local_cluster("--model", str(path), "--dtype", "float32", *sizes) as cluster:
        with httpx.Client(base_url=cluster.url, timeout=60) as client:
            bodies = make_bodies(client)

        async def storm() -> Outcomes:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=cluster.url, timeout=None, limits=limits) as client:  # noqa: S113
                undisturbed = [await ask(client, body) for body in bodies]
                tempest = Storm(cluster, bodies, undisturbed)
                await tempest.run(client)
                return tempest.outcomes

        (router,) = cluster.children("router")
        outcomes = asyncio.run(storm())
        assert not outcomes.wrong, outcomes.wrong[:3]
        assert outcomes.answered >= 30, outcomes
        assert outcomes.left > 0
        assert {status for status, _ in outcomes.errors} <= {200, 429, 503}, outcomes.errors
        assert {code for _, code in outcomes.errors} <= {"no_nodes", "node_lost", "overloaded"}, outcomes.errors
        wait_for(lambda: all_ready(cluster), 60)
        cluster.settle(15)
        wait_for(lambda: value(scrape(cluster.url), "kvferry_requests_inflight") == 0)
        assert value(scrape(cluster.url), "kvferry_retries_total") >= 1
        assert cluster.children("router") == [router], "the router itself was never disturbed"
        for role in ("prefill", "decode"):
            for url in cluster.worker_urls(role):
                assert "fault" not in httpx.get(f"{url}/health").json()

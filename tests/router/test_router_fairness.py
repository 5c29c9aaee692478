"""Two tenants before nodes that compute at a known pace: what one's flood costs the other is the router's doing."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import httpx
import pytest

from kvferry.protocol.lease import Rates
from kvferry.protocol.messages import PrefillRequest
from kvferry.protocol.router_metrics import RouterMetrics
from kvferry.protocol.settings import RouterSettings
from kvferry.router.api.generation import Generation
from kvferry.router.api.sequence_stream import Choice, SequenceStream
from kvferry.router.tenants.keys import entry
from tests.api_parts import app_of, demo_text
from tests.fake_workers import Answer, Bench, FakeWorker, decode, honest_prefill, prefill

RATE = 1000.0
"""Prompt tokens that the prefill node computes in a second, one prompt after another in the order of their arrival."""
FLOOD, REQUESTS = 64, 8
STEADY = 300
"""Prompt tokens of the steady tenant."""


def node_changes() -> dict[str, object]:
    return {"max_num_seqs": 16, "rates": Rates(prefill_tokens_per_s=RATE)}


class Clients:
    """Of both tenants; each answer is read as it streams."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def first_s(self, key: str, prompt: int, output: int) -> float:
        """Seconds to the first event of a stream, read to its end."""
        start = time.monotonic_ns() % 20000
        body = {"prompt": list(range(start, start + prompt)), "max_tokens": output, "stream": True}
        began, first = time.monotonic(), 0.0
        headers = {"authorization": f"Bearer {key}"}
        async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first = first or time.monotonic() - began
        return first

    async def flood(self, key: str) -> None:
        while True:
            await self.first_s(key, 30, 16)

    async def steady(self, flooder: str, requests: int) -> list[float]:
        """First tokens of the steady tenant while `flooder`'s key floods, if one does."""
        tasks = [asyncio.create_task(self.flood(flooder)) for _ in range(FLOOD if flooder else 0)]
        await asyncio.sleep(0.5 if flooder else 0)
        try:
            return [await self.first_s("key-steady", STEADY, 2) for _ in range(requests)]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_flood_costs_the_other_tenant_less_than_half_of_its_wait_alone(tmp_path: Path) -> None:
    busy = asyncio.Lock()
    newcomers: list[bool] = []

    async def computes(worker: FakeWorker, request: PrefillRequest) -> Answer:
        if len(request.job.token_ids) == STEADY:
            newcomers.append(request.job.newcomer)
        async with busy:
            await asyncio.sleep(len(request.job.token_ids) / RATE)
        async for answer in honest_prefill(worker, request):
            yield answer

    keys = tmp_path / "keys.toml"
    keys.write_text(entry("steady", "key-steady") + entry("flood", "key-flood"))
    nodes = [
        prefill(prefill_script=computes, changes=node_changes()),
        decode(step_s=0.01, changes=node_changes()),
    ]
    async with Bench(nodes) as bench:
        settings = RouterSettings(api_keys=str(keys))
        app = app_of(bench.cluster, demo_text(), RouterMetrics(), settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
            clients = Clients(http)
            alone = await clients.steady("", REQUESTS)
            flooded = await clients.steady("key-flood", REQUESTS)
            among_its_own = await clients.steady("key-steady", 2)
    assert newcomers[:REQUESTS] == [False] * REQUESTS, "nobody else was there"
    assert sum(newcomers[REQUESTS : 2 * REQUESTS]) >= REQUESTS - 1, newcomers
    told = f"alone {alone}, flooded {flooded}, among its own {among_its_own}"
    assert statistics.median(flooded) < 1.5 * statistics.median(alone), told
    assert sorted(flooded)[-2] < 2 * max(alone), told
    assert statistics.median(among_its_own) > 3 * statistics.median(alone), told


@pytest.mark.parametrize(
    "body",
    [{"prompt": [5, 6, 7], "n": 40}, {"prompt": [[number, 6, 7] for number in range(40)]}],
    ids=["choices", "prompts"],
)
async def test_a_request_of_many_sequences_has_no_more_at_the_nodes_than_its_tenant_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, object]
) -> None:
    """They would take every seat, and newcomers have to wait for one."""
    follow, there = Generation._follow, [0, 0]

    def counted(generation: Generation, choice: Choice) -> SequenceStream:
        there[0] += 1
        there[1] = max(there)
        pieces = follow(generation, choice)
        left = pieces.aclose

        async def aclose() -> None:
            there[0] -= 1
            await left()

        monkeypatch.setattr(pieces, "aclose", aclose)
        return pieces

    monkeypatch.setattr(Generation, "_follow", counted)
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("many", "key-many") + entry("other", "key-other"))
    nodes = [prefill(changes=node_changes()), decode(changes=node_changes())]
    async with Bench(nodes) as bench:
        app = app_of(bench.cluster, demo_text(), RouterMetrics(), RouterSettings(api_keys=str(keys)))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as http:
            headers = {"authorization": "Bearer key-many"}
            answer = await http.post("/v1/completions", json=body | {"max_tokens": 3}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(40))
    assert there == [0, 8], "half of the seats"

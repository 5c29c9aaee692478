"""Rollouts, drains and failures as Kubernetes brings them about, under streams and new requests: not one may fail.

The clients compare every token with the right one, open a connection for each request, and never try again.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.commands import tiny_model
from tests.chaos.shape import MODEL
from tests.chaos.zygote import Zygote
from tests.pods import House, Met, Service, house
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

LONG, SHORT = 120, 20
"""Tokens: some streams outlive what happens to their node, some begin in the middle of it."""
ENOUGH = 12
"""Answers, of which some began when all was over."""
LEASE_S = 5.0
MEND_S = 70.0
"""By when a frozen pod must have been given up by its probes."""


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def pods(zygote: Zygote, model: Path, tmp_path: Path) -> AsyncIterator[House]:
    async with house(zygote, tmp_path, model) as made:
        yield made


def bodies() -> list[dict[str, Any]]:
    rng = random.Random(11)
    shared = rng.choices(range(3, 500), k=80)
    return [
        {
            "model": MODEL, "prompt": shared[: 40 * (number % 3)] + rng.choices(range(3, 500), k=30 + 9 * number),
            "max_tokens": LONG if number % 2 else SHORT, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }
        for number in range(10)
    ]  # fmt: skip


@asynccontextmanager
async def under_load(pods: House, what: str, **nodes: int) -> AsyncIterator[Met]:
    """Streams while the block runs; none fails."""
    await pods.known(**nodes)
    service = Service(pods, bodies())
    await service.learn()
    began = time.monotonic()
    async with service.busy() as met:
        yield met
        await until(lambda: met.answered >= ENOUGH or met.failures, 60)
    print(f"\n{what}: {met.answered} answers in {time.monotonic() - began:.1f} s, {len(met.failures)} failed, ", end="")
    print(f"longest pause {met.pause_s:.2f} s")
    assert met.failures == []


async def test_decode_with_surge(pods: House) -> None:
    """The new pod is ready before the old one is asked to end."""
    await pods.ready("router")
    await pods.ready("prefill")
    old = [await pods.ready("decode") for _ in range(2)]
    async with under_load(pods, "decode, surge", prefill=1, decode=2):
        for pod in old:
            await pods.ready("decode")
            assert await pod.ends() < 20, "its streams move, it need not wait for their ends"


async def test_one_decode_without_surge(pods: House) -> None:
    """The old pod is asked to end; where a new one starts beside it, it works until that one is ready."""
    await pods.ready("router")
    await pods.ready("prefill")
    old = await pods.ready("decode")
    async with under_load(pods, "decode, one replica, no surge", prefill=1, decode=1) as met:
        ending = asyncio.create_task(old.ends())
        await asyncio.sleep(1.5)
        before = met.answered
        await asyncio.sleep(1.5)
        assert not ending.done(), "nobody else is there"
        assert met.answered > before, "it takes new requests"
        await pods.ready("decode")
        await ending


async def test_one_decode_whose_successor_starts_when_it_is_gone(pods: House) -> None:
    """Its grace ends with nobody there: requests wait in the router, and streams go on at the new pod."""
    await pods.ready("router")
    await pods.ready("prefill")
    old = await pods.ready("decode", "--drain-timeout", "2")
    async with under_load(pods, "decode, one replica, successor when it is gone", prefill=1, decode=1):
        assert 1.5 < await old.ends() < 8
        await pods.ready("decode")


@pytest.mark.parametrize("surge", [True, False], ids=["surge", "no surge"])
async def test_prefill(pods: House, surge: bool) -> None:
    await pods.ready("router")
    old = await pods.ready("prefill", *() if surge else ("--drain-timeout", "2"))
    await pods.ready("decode")
    async with under_load(pods, f"prefill, {'surge' if surge else 'no surge'}", prefill=1, decode=1):
        if surge:
            await pods.ready("prefill")
        await old.ends()
        if not surge:
            await pods.ready("prefill")
        await pods.known(prefill=1)
        await asyncio.sleep(1)


async def test_two_routers(pods: House) -> None:
    old = [await pods.ready("router") for _ in range(2)]
    await pods.ready("prefill")
    await pods.ready("decode")
    async with under_load(pods, "routers", prefill=1, decode=1):
        await pods.ready("router")
        for pod in old:
            await pods.leave_service(pod)
            await pod.ends()


async def test_routers_while_the_registry_is_away(pods: House) -> None:
    """A new router would know of no node, so it is not ready and the old ones stay; then the registry comes back."""
    old = await pods.ready("router")
    await pods.ready("prefill")
    await pods.ready("decode")
    async with under_load(pods, "routers, registry away", prefill=1, decode=1):
        everybody = list(pods.pods)
        pods.cut(*everybody)
        new = await pods.start("router", redis=False)
        async with asyncio.timeout(30):
            while (await new.asks("/health"))[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert (await new.asks("/ready"))[0] == 503
        await asyncio.sleep(LEASE_S + 1)
        assert not await new.ready(), "it would take the place of one that remembers its nodes"
        assert await old.ready()
        pods.heal(*everybody, new)
        await new.is_ready()


async def test_a_rollout_while_the_registry_is_away(pods: House) -> None:
    """A new pod never becomes ready, and old ones go on, also those that are asked to end all the same; then it comes
    back."""
    await pods.ready("router")
    await pods.ready("prefill")
    old = [await pods.ready("decode") for _ in range(2)]
    async with under_load(pods, "decode, registry away", prefill=1, decode=2):
        everybody = list(pods.pods)
        pods.cut(*everybody)
        new = await pods.start("decode", redis=False)
        ending = asyncio.create_task(old[0].ends())
        async with asyncio.timeout(30):
            while ((await new.asks("/health"))[1] or {}).get("status") != "joining":  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await asyncio.sleep(LEASE_S + 1)
        assert not await new.ready()
        assert not await old[1].ready(), "budgets must not count pods that no router would find"
        assert (await old[1].asks("/health"))[0] == 200, "they live"
        assert await pods.endpoints[0].ready(), "and so does the router"
        assert not ending.done(), "nobody can tell whether another is there: it stays"
        pods.heal(*everybody, new)
        await new.is_ready()
        await old[1].is_ready()
        await ending
        assert sum(pods.told(pod, "lease not written") for pod in old) == 2, "a line an outage"


async def test_frozen_pods_are_given_up_in_seconds(pods: House) -> None:
    """A process that stands still: requests go elsewhere at once, and its lease ends."""
    await pods.ready("router")
    prefills = [await pods.ready("prefill") for _ in range(2)]
    decodes = [await pods.ready("decode") for _ in range(2)]
    for role, pod in (("decode", decodes[0]), ("prefill", prefills[0])):
        async with under_load(pods, f"{role}, frozen", **{role: 2}) as met:
            began = time.monotonic()
            pod.signal(signal.SIGSTOP)
            await pods.known(**{role: 1})
            assert time.monotonic() - began < LEASE_S
            assert (await pod.asks("/health"))[0] == 0, "its probe fails"
            await asyncio.sleep(1)
            await pod.is_killed()
            await pods.ready(role)
            await asyncio.sleep(1)
            assert met.pause_s < 10


async def test_a_decode_that_dies_again_and_again_leaves_nothing_unsaid(pods: House) -> None:
    """No future and no task of the router is lost over it: `house` looks for them in the log."""
    router = await pods.ready("router")
    await pods.ready("prefill")
    decode = [await pods.ready("decode") for _ in range(2)]
    async with under_load(pods, "decode, killed and started", prefill=1, decode=2):
        for _ in range(3):
            await decode.pop(0).is_killed()
            decode.append(await pods.ready("decode"))
            await pods.known(decode=2)
    await until(lambda: pods.told(router, "is lost") >= 3)


async def test_when_nobody_is_left_clients_are_told(pods: House) -> None:
    """Requests are held for --queue-timeout; streams of the very last node that nobody takes over end with an error."""
    router = await pods.ready("router", "--queue-timeout", "1.5")
    last = await pods.ready("decode", "--drain-timeout", "0.5")
    await pods.known(decode=1)
    async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=30) as client:
        body = bodies()[0] | {"max_tokens": 400, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await last.ends()
            rest = [line async for line in lines if line]
        assert "no_nodes" in rest[-1] or "no_nodes" in rest[-2], rest[-2:]
        began = time.monotonic()
        refused = await client.post("/v1/completions", json=bodies()[0])
        assert 1.0 < time.monotonic() - began < 5
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_nodes")
        assert int(refused.headers["retry-after"]) >= 1
        statuses = {path: (await client.get(path)).status_code for path in ("/health", "/ready", "/ready?nodes=1")}
        assert statuses == {"/health": 200, "/ready": 200, "/ready?nodes=1": 503}
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL
        async with asyncio.timeout(15):  # an empty registry may have lost what it held: it is believed after a while
            while (await client.get("/targets")).json():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        held = asyncio.create_task(client.post("/v1/completions", json=bodies()[0]))
        await pods.ready("decode")
        assert (await held).status_code in (200, 503), "as fast as the pod was"
        await pods.known(decode=1)
        assert (await client.post("/v1/completions", json=bodies()[0])).status_code == 200

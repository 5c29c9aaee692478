"""An upgrade across wire versions: both releases stand side by side in one Redis, then traffic moves. No request fails.

Within a release's own name they would not even share that; here they do, for it is the harder case.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.commands import tiny_model
from tests.chaos.zygote import Zygote
from tests.cluster.test_rollouts import under_load
from tests.later_wire import LaterZygote
from tests.pods import House, Pod, house
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def zygotes() -> Iterator[tuple[Zygote, Zygote]]:
    made = Zygote(), LaterZygote()
    yield made
    for each in made:
        each.close()


@pytest.fixture
async def pods(zygotes: tuple[Zygote, Zygote], tmp_path: Path) -> AsyncIterator[House]:
    async with house(zygotes[0], tmp_path, tiny_model(tmp_path)) as made:
        yield made


@contextmanager
def of(pods: House, zygote: Zygote) -> Iterator[None]:
    """Pods that are started meanwhile are its forks."""
    before, pods._zygote = pods._zygote, zygote
    yield
    pods._zygote = before


async def nodes(router: Pod) -> dict[str, int]:
    return dict((await router.asks("/ready"))[1]["nodes"])


async def test_a_doubled_cluster_moves_to_another_wire_version(pods: House, zygotes: tuple[Zygote, Zygote]) -> None:
    old_router = await pods.ready("router")
    old = [await pods.ready("prefill"), *[await pods.ready("decode") for _ in range(2)]]
    async with under_load(pods, "another wire version", prefill=1, decode=2):
        with of(pods, zygotes[1]):
            for role in ("prefill", "decode", "decode"):
                await pods.ready(role)
            new_router = await (await pods.start("router")).is_ready()
        await until(lambda: pods.told(old_router, "speaks wire version") == 3, 30)
        await until(lambda: pods.told(new_router, "speaks wire version") == 3, 30)
        assert await nodes(old_router) == await nodes(new_router) == {"prefill": 1, "decode": 2}
        pods.endpoints.append(new_router)
        await pods.leave_service(old_router)
        await old_router.ends()
        for pod in old:
            await pod.ends()
        assert await nodes(new_router) == {"prefill": 1, "decode": 2}
    await until(lambda: not pods.told(new_router, "is lost"))


async def test_a_router_alone_of_its_version_says_why_it_serves_nobody(
    pods: House, zygotes: tuple[Zygote, Zygote]
) -> None:
    """What happens without doubling: the new router does not take the place of the old one, and tells why."""
    old = await pods.ready("router")
    await pods.ready("decode")
    with of(pods, zygotes[1]):
        new = await pods.start("router", "--queue-timeout", "1")
    await until(lambda: pods.told(new, "speaks wire version") == 1, 30)
    async with asyncio.timeout(60):
        while (answer := await new.asks("/ready"))[0] != 503:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert "another wire version" in answer[1]["status"]
    assert await nodes(new) == {"prefill": 0, "decode": 0}
    assert (await new.asks("/ready?nodes=1"))[0] == 503
    assert await nodes(old) == {"prefill": 0, "decode": 1}

"""The share of new requests that goes to the nodes of one engine or version."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

from kvferry.protocol.adapters import AdapterName
from kvferry.protocol.lease import Load
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.settings import RouterSettings
from kvferry.protocol.work import Generate
from kvferry.router.dispatch.canary_release import CanaryRelease
from kvferry.router.dispatch.interface import RequestSpec
from kvferry.router.request_context import RequestContext
from tests.fake_workers import PROMPT, Bench, FakeWorker, collect, decode, expected, ids
from tests.waiting import until


def versions() -> list[FakeWorker]:
    vllm = {"fingerprint": "v1", "engine": "vllm 0.32.0"}
    return [
        decode("own", epoch=3),
        decode("vllm", epoch=2, changes=vllm),
        decode("new", epoch=4, changes={"fingerprint": "n"}),
    ]


def spec(number: int, tenant: str = "", **changes: Any) -> RequestSpec:
    now = time.monotonic()
    call = RequestContext(f"r{number}", now, now + 60.0, tenant)
    return RequestSpec(call, f"r{number}-0", PROMPT, Generate(SamplingParams(max_tokens=2)), **changes)


async def placed(bench: Bench, count: int, **changes: Any) -> Counter[str]:
    """Where so many requests went."""
    for number in range(count):
        assert ids(await collect(bench.cluster.start(spec(number, **changes)))) == expected(PROMPT, 2)
    return Counter({name: len(worker.jobs) for name, worker in bench.workers.items() if worker.jobs})


def test_the_share_is_that_of_requests_and_the_same_everywhere() -> None:
    taken = [CanaryRelease(0.05).takes("t", f"r{number}") for number in range(20_000)]
    assert 0.045 < sum(taken) / len(taken) < 0.055
    assert taken == [CanaryRelease(0.05).takes("t", f"r{number}") for number in range(20_000)]
    assert taken != [CanaryRelease(0.05).takes("u", f"r{number}") for number in range(20_000)]
    more = [CanaryRelease(0.2).takes("t", f"r{number}") for number in range(20_000)]
    assert all(wide for narrow, wide in zip(taken, more, strict=True) if narrow), "a larger share keeps its requests"


def test_none_and_all() -> None:
    assert not any(CanaryRelease(0.0).takes("", str(number)) for number in range(1000))
    assert all(CanaryRelease(1.0).takes("", str(number)) for number in range(1000))


def test_a_tenant_is_drawn_as_a_whole() -> None:
    canary = CanaryRelease(0.3, by_tenant=True)
    drawn = {tenant: {canary.takes(f"t{tenant}", f"r{number}") for number in range(20)} for tenant in range(400)}
    assert {len(each) for each in drawn.values()} == {1}
    assert 0.2 < sum(True in each for each in drawn.values()) / 400 < 0.4


def test_the_settings_choose_it() -> None:
    assert CanaryRelease.of(RouterSettings()) is None
    settings = RouterSettings(canary_weight=0.0, canary_engine="vllm", canary_by="tenant")
    assert CanaryRelease.of(settings) == CanaryRelease(0.0, "vllm", by_tenant=True)
    assert CanaryRelease.of(RouterSettings(canary_weight=0.1)) == CanaryRelease(0.1, "newest")


@pytest.mark.parametrize(
    ("engine", "there"), [("vllm 0.3", {"vllm"}), ("v1", {"vllm"}), ("kvferry", {"own", "new"}), ("newest", {"new"})]
)
async def test_only_the_canary_takes_its_share_and_only_the_others_take_the_rest(engine: str, there: set[str]) -> None:
    for weight, nodes in ((1.0, there), (0.0, {"own", "vllm", "new"} - there)):
        async with Bench(versions(), canary=CanaryRelease(weight, engine)) as bench:
            assert {*await placed(bench, 8)} == nodes


async def test_each_request_goes_where_it_is_drawn() -> None:
    canary = CanaryRelease(0.3, "vllm")
    async with Bench(versions(), canary=canary) as bench:
        found = await placed(bench, 40)
        drawn = sum(canary.takes("", f"r{number}") for number in range(40))
        assert 0 < drawn < 40
        assert found["vllm"] == drawn


async def test_a_version_alone_takes_all() -> None:
    for weight in (0.0, 1.0):
        async with Bench([decode("own")], canary=CanaryRelease(weight)) as bench:
            assert await placed(bench, 4) == {"own": 4}


@pytest.mark.parametrize(("weight", "gone", "left"), [(1.0, {"new"}, {"own", "vllm"}), (0.0, {"own", "vllm"}, {"new"})])
async def test_requests_go_to_whoever_is_there(weight: float, gone: set[str], left: set[str]) -> None:
    """Without a decode node of the canary, or of the others."""
    async with Bench(versions(), canary=CanaryRelease(weight, "n")) as bench:
        for name in gone:
            bench[name].crash()
        await until(lambda: bench.cluster.ready()["decode"] == len(left))
        assert {*await placed(bench, 6)} == left


async def test_a_canary_that_cannot_hold_a_request_or_lacks_its_adapter_does_not_get_it() -> None:
    small = {"fingerprint": "n", "load": Load(free_blocks=4, total_blocks=4)}
    async with Bench([decode("own"), decode("new", changes=small)], canary=CanaryRelease(1.0, "n")) as bench:
        assert await placed(bench, 4) == {"own": 4}
    tuned = decode("own", changes={"adapters": (AdapterName("a", "a1"),)})
    async with Bench([tuned, decode("new", changes={"fingerprint": "n"})], canary=CanaryRelease(1.0, "n")) as bench:
        assert await placed(bench, 4, adapter="a1") == {"own": 4}


async def test_a_request_that_fails_at_the_canary_goes_on_at_the_others() -> None:
    failing = decode("new", epoch=4, fail_attempts=["server_error"] * 20, changes={"fingerprint": "n"})
    async with Bench(
        [decode("own"), failing, decode("new2", changes={"fingerprint": "n"})], canary=CanaryRelease(1.0, "n")
    ) as bench:
        found = await placed(bench, 6)
        assert found["new"] == found["own"] > 0
        assert found["new"] + found["new2"] == 6


async def test_a_request_that_fails_at_the_others_stays_with_them() -> None:
    failing = decode("own", fail_attempts=["server_error"] * 20)
    async with Bench(
        [failing, decode("own2"), decode("new", changes={"fingerprint": "n"})], canary=CanaryRelease(0.0, "n")
    ) as bench:
        found = await placed(bench, 6)
        assert found["own"] > 0
        assert found["own2"] == 6
        assert "new" not in found

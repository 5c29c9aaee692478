"""Jobs with values that no router sends: each is refused by a typed error, and leaves nothing on either node."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvferry.protocol.messages import CancelRequest, GenerateRequest, Job, PrefillRequest
from kvferry.protocol.sampling import SamplingParams
from kvferry.protocol.wire import MAX_FRAME_BYTES
from kvferry.protocol.work import Classify, Embed, Generate, Grammar
from tests.mutations import mutated
from tests.toy import make_job
from tests.waiting import until
from tests.worker_pair import Router, pair

ODD: list[Any] = [None, True, -1, 2**62, 0.5, float("nan"), "x", b"x", (), (None,), {}, {"a": 1}]
KINDS: list[Any] = ["?", 5, "regex"]
PARAMS = ("max_tokens", "temperature", "top_p", "seed", "logit_bias", "stop_token_ids", "logprobs", "bad_words",
          "allowed_token_ids", "min_tokens", "eos_token_ids", "prompt_logprobs")  # fmt: skip


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with pair() as running:
        yield running


def hostile() -> list[tuple[str, Job]]:
    """Named by what is wrong with each."""
    plain = make_job("h", [1, 2, 3])
    found: list[tuple[str, Job]] = []
    for field in ("attempt", "token_ids", "prompt_len", "work", "namespace", "fork_of", "trace", "deadline_s"):
        found += [(f"{field} {value!r}", replace(plain, **{field: value})) for value in ODD]
    for field in PARAMS:
        found += [
            (f"{field} {value!r}", replace(plain, work=Generate(replace(SamplingParams(), **{field: value}))))
            for value in ODD
        ]
    works: list[Any] = [Generate(value) for value in ODD] + [Generate(SamplingParams(), value) for value in ODD[1:]]
    works += [Embed(value) for value in ODD] + [Embed("last", True, value) for value in ODD]
    works += [Classify(value) for value in ODD] + [SamplingParams(), Grammar("regex", "a")]
    works += [Generate(SamplingParams(), Grammar(kind, source)) for kind in KINDS for source in ODD]
    found += [(repr(work), replace(plain, work=work)) for work in works]
    return [(name, replace(job, request_id=f"h{number}")) for number, (name, job) in enumerate(found)]


async def test_both_nodes_refuse_or_end_each_and_go_on(router: Router) -> None:
    left, broken = [], []
    for name, job in hostile():
        answer = router.post_prefill(job, router.decode.target)
        try:
            await asyncio.wait_for(asyncio.shield(answer.task), 3)
        except TimeoutError:
            left.append(f"prefill: {name}")
            await answer.hang_up()
        except Exception as error:
            broken.append(f"prefill: {name}: {error!r}")
        if answer.status == 500:
            broken.append(f"prefill 500: {name}")
        try:
            response = await router.generate(job)
        except Exception as error:
            broken.append(f"decode: {name}: {error!r}")
            continue
        if response.status_code == 500:
            broken.append(f"decode 500: {name}")
        elif response.status_code < 300:
            try:
                await asyncio.wait_for(until(lambda job=job: ended(router, job)), 3)
            except (TimeoutError, AssertionError):
                left.append(f"decode: {name}")
                await router.cancel(job)
    good = make_job("good", [5, 6, 7])
    await router.post_prefill(good, router.decode.target).ended()
    await until(lambda: router.finished("good"))
    await router.prefill.settle()
    await router.decode.settle()
    assert not left
    assert not broken


def ended(router: Router, job: Job) -> bool:
    return router.finished(job.request_id) or any(failed.request_id == job.request_id for failed in router.failed)


@pytest.mark.parametrize("seed", range(2))
async def test_damaged_messages_of_routers_are_answered_and_both_nodes_go_on(router: Router, seed: int) -> None:
    """Anything but the node's own failure may be the answer."""
    rng, broken = random.Random(seed), []
    urls = {"prefill": router.prefill.node.address.url, "decode": router.decode.node.address.url}
    async with httpx.AsyncClient(trust_env=False, timeout=10) as http:
        for number in range(150):
            job = make_job(f"m{seed}-{number}", [1, 2, 3], max_tokens=2)
            path, message = rng.choice((
                ("prefill", PrefillRequest(job, router.decode.target)), ("prefill", PrefillRequest(job)),
                ("generate", GenerateRequest(job)), ("cancel", CancelRequest(job.request_id, 0)),
            ))  # fmt: skip
            node = "decode" if path == "generate" else rng.choice(tuple(urls)) if path == "cancel" else "prefill"
            data = mutated(message, rng)
            try:
                response = await http.post(f"{urls[node]}/attempts/{path}", content=data)
            except httpx.TransportError as error:
                broken.append((path, data, repr(error)))
                continue
            if response.status_code >= 500:
                broken.append((path, data, response.text))
    assert not broken
    good = make_job(f"good {seed}", [5, 6, 7])
    await router.post_prefill(good, router.decode.target).ended()
    await until(lambda: router.finished(good.request_id))


async def test_a_message_longer_than_any_is_refused(router: Router) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(65):
            yield b"\xc0" * 2**20

    async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
        response = await http.post(f"{router.decode.node.address.url}/attempts/generate", content=endless())
    assert response.status_code == 413
    assert str(MAX_FRAME_BYTES) in response.json()["error"]["message"]

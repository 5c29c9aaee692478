"""A request leaves nothing to the garbage collector: its memory is used again at once, and no pass over all requests
that are open holds their tokens up."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from kvferry.protocol.errors import BlocksCorrupt, Overloaded
from kvferry.protocol.messages import AttemptFailed, PrefillRequest
from kvferry.runtime.signals import StopSignal
from tests.fake_workers import Bench, FakeWorker, decode, honest_prefill, prefill
from tests.router.test_router_process import router

PROMPT = list(range(100, 164))
CHAT = [{"role": "user", "content": "What does a ferry carry?"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("/v1/completions", {"prompt": PROMPT, "stream": True}),
    "whole": ("/v1/completions", {"prompt": PROMPT}),
    "one token": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "stream": True, "logprobs": True}),
    "choices": ("/v1/completions", {"prompt": PROMPT, "n": 3, "stream": True}),
    "prompts": ("/v1/completions", {"prompt": [PROMPT, PROMPT[1:]]}),
    "stop": ("/v1/completions", {"prompt": PROMPT, "stop": ["e", "a"], "stream": True}),
    "response": ("/v1/responses", {"input": CHAT, "store": False, "stream": True, "max_output_tokens": 16}),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 8, "stream": True}),
    "refused": ("/v1/completions", {"prompt": PROMPT, "temperature": -1}),
}


@pytest.fixture(scope="module", autouse=True)
def thawed() -> Iterator[None]:
    """What the tests froze is searched once more: a router that has ended is garbage."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def garbage() -> Iterator[list[str]]:
    """What of the router only a collector would free, after the block. It looks at what the block makes alone: going
    through all that the process holds takes a second."""
    found: list[str] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = (type(each) for each in gc.garbage)
        found += [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__.startswith("router.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def left_by(ask: Callable[[], Awaitable[None]]) -> Counter[str]:
    """By requests that come after the first one."""
    await ask()
    with garbage() as found:
        for _ in range(3):
            await ask()
        await asyncio.sleep(0.3)
    return Counter(found)


@pytest.mark.timeout(120)
async def test_a_request_leaves_nothing_whatever_it_asks_for() -> None:
    async with Bench([prefill(), decode()]) as bench, router(bench, StopSignal()) as (client, _):

        async def ask(path: str, body: dict[str, Any]) -> None:
            answer = await client.post(path, json={"model": "", "max_tokens": 8, **body})
            assert answer.status_code == (400 if "temperature" in body else 200), answer.text

        left = {kind: await left_by(partial(ask, *asked)) for kind, asked in BODIES.items()}
    assert not {kind: found for kind, found in left.items() if found}


async def test_texts_that_end_while_they_are_heard_leave_nothing() -> None:
    async with Bench([prefill(), decode(step_s=0.01)]) as bench, router(bench, StopSignal()) as (client, _):
        body: dict[str, Any] = {"model": "", "prompt": PROMPT, "max_tokens": 20}

        async def ask(**more: Any) -> str:
            return (await client.post("/v1/completions", json={**body, **more})).text

        async def stopped(stream: bool, n: int) -> None:
            assert '"stop"' in await ask(stop=stop, stream=stream, n=n)

        text = json.loads(await ask())["choices"][0]["text"]
        stop = text[len(text) // 2 :][:3]
        left = {(stream, n): await left_by(partial(stopped, stream, n)) for stream in (True, False) for n in (1, 3)}
    assert not {asked: found for asked, found in left.items() if found}


async def test_a_node_that_refuses_leaves_nothing() -> None:
    full = prefill()
    full.refusal = Overloaded("as the test wants")
    async with Bench([full, decode()]) as bench, router(bench, StopSignal()) as (client, _):

        async def ask() -> None:
            answer = await client.post("/v1/completions", json={"model": "", "prompt": PROMPT, "max_tokens": 8})
            assert answer.status_code == 200, answer.text

        assert await left_by(ask) == Counter()
        assert full.prefills


async def test_choices_whose_time_ends_together_leave_nothing() -> None:
    async with (
        Bench([prefill(), decode(step_s=0.02)]) as bench,
        router(bench, StopSignal(), request_timeout=0.5) as (client, _),
    ):
        body = {"model": "", "prompt": [PROMPT, PROMPT[1:]], "max_tokens": 500}

        async def ask() -> None:
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 504, answer.text

        assert await left_by(ask) == Counter()


async def test_a_client_that_leaves_and_a_node_that_fails_leave_nothing() -> None:
    tries = 0

    async def every_other(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[Any]:
        nonlocal tries
        tries += 1
        if tries % 2:
            failed = BlocksCorrupt("as the test wants")
            yield AttemptFailed(request.job.request_id, request.job.attempt, failed.code, str(failed))
            return
        async for answer in honest_prefill(worker, request):
            yield answer

    workers = [prefill(prefill_script=every_other), decode(step_s=0.01)]
    async with Bench(workers) as bench, router(bench, StopSignal()) as (client, _):

        async def leave(choices: int) -> None:
            body = {"model": "", "prompt": PROMPT, "max_tokens": 500, "n": choices, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                await anext(response.aiter_lines())

        assert await left_by(partial(leave, 1)) == Counter()
        assert await left_by(partial(leave, 3)) == Counter()

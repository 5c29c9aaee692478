"""Dispatches that go on behind tokens that another one delivered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.protocol.errors import NoNodes
from kvferry.protocol.prefix_reuse import Reuse
from kvferry.router.dispatch.interface import Delivered, Route
from tests.fake_workers import PROMPT, Bench, collect, decode, expected, ids, prefill

ROUTE = Route("p9", "d9", Reuse(len(PROMPT), reused_prefill=16, computed=len(PROMPT) - 16))


async def test_the_rest_comes_behind_the_delivered_tokens() -> None:
    async with Bench([prefill(), decode()]) as bench:
        first = bench.start(8)
        whole = ids(await collect(first))
        assert first.fork is not None
        delivered = Delivered(tuple(whole[:3]), ROUTE, first.fork.fingerprint)
        dispatch = bench.start(8, delivered=delivered)
        outputs = await collect(dispatch)
        assert ids(outputs) == whole[3:] == expected(PROMPT, 8)[3:]
        assert outputs[-1].finish_reason == "length"
        assert dispatch.route == ROUTE, "the client was told so"
        job = (bench["p1"].prefills[-1]).job
        assert job.token_ids == PROMPT + tuple(whole[:3])
        assert job.prompt_len == len(PROMPT)


async def test_no_other_nodes_than_those_of_its_fingerprint() -> None:
    async with Bench([prefill(), decode()], max_wait_s=0.3) as bench:
        dispatch = bench.start(8, delivered=Delivered((1, 2), ROUTE, "other"))
        with pytest.raises(NoNodes):
            await collect(dispatch)


async def test_without_tokens_it_is_a_new_request() -> None:
    async with Bench([prefill(), decode()]) as bench:
        dispatch = bench.start(8, delivered=Delivered(()))
        assert ids(await collect(dispatch)) == expected(PROMPT, 8)
        assert dispatch.route is not None
        assert replace(dispatch.route) != ROUTE

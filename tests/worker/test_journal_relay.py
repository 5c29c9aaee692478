"""A node calls the journals' scripts for routers, and says soon that the store does not answer it either."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from fastapi import FastAPI

from kvferry.cluster_state.journal_calls import Values
from kvferry.protocol.relayed_journals import JournalAnswer, JournalCall
from kvferry.protocol.wire import pack, unpack
from kvferry.runtime.http import make_app
from kvferry.worker.journal_relay import ANSWER_S, JournalRelay


class Scripts:
    def __init__(self, silent: bool = False) -> None:
        self.calls: list[tuple[str, Sequence[str | bytes | int]]] = []
        self._silent = silent

    async def run(self, name: str, args: Sequence[str | bytes | int]) -> Values:
        self.calls.append((name, args))
        if self._silent:
            await asyncio.sleep(60)
        return b"1", b""


async def posted(scripts: Scripts, body: bytes) -> httpx.Response:
    app: FastAPI = make_app(lambda: (200, {}), lambda: "")
    JournalRelay(scripts).mount(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
        return await client.post("/journals", content=body)


async def test_a_call_is_passed_on_and_its_answer_passed_back() -> None:
    scripts = Scripts()
    answer = await posted(scripts, pack(JournalCall("append", (b"owner", b"\x00\xff"))))
    assert unpack(answer.content) == JournalAnswer((b"1", b""))
    assert scripts.calls == [("append", (b"owner", b"\x00\xff"))]


@pytest.mark.parametrize("body", [pack(JournalCall("flushall", ())), b"\x80", pack(JournalAnswer(()))])
async def test_nothing_but_the_journals_scripts_is_called(body: bytes) -> None:
    scripts = Scripts()
    assert (await posted(scripts, body)).status_code == 400
    assert not scripts.calls


async def test_a_node_whose_store_is_silent_says_so_soon() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    answer = await posted(Scripts(silent=True), pack(JournalCall("read", ())))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "registry_unavailable"
    assert loop.time() - began < 2 * ANSWER_S

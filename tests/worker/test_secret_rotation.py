"""A cluster exchanges its secret for another one while it works: real HTTP, real links, no restart, no refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.protocol.errors import TransferFailed
from kvferry.protocol.messages import FirstToken, PrefillRequest, ShipDone, StepFrame, TokenDelta
from kvferry.protocol.settings import RouterSettings
from kvferry.router.nodes.client import NodeClient
from kvferry.runtime import watched_file
from kvferry.runtime.cluster_secret import HEADER, ClusterSecrets, read_secrets
from tests.toy import expected, make_engine, make_job
from tests.waiting import until
from tests.worker_pair import Worker, worker

OLD, NEW = "the old secret of it", "the new secret of it"
STEPS = (f"{OLD}\n{NEW}\n", f"{NEW}\n{OLD}\n", f"{NEW}\n")


class Cluster:
    """A prefill and a decode node and a router's connections to them; each has a file of its own, as pods have."""

    def __init__(self, files: dict[str, Path], prefill: Worker, decode: Worker, secrets: ClusterSecrets) -> None:
        self.files, self.prefill, self.decode = files, prefill, decode
        self.known = {"prefill": prefill.node.address.secrets, "decode": decode.node.address.secrets, "router": secrets}
        self.client = NodeClient("router", secrets.token)
        self.frames: list[StepFrame] = []
        self.asked = 0

    async def serves(self) -> None:
        """A prompt that goes from node to node, over a connection made now. Raises what refuses it."""
        await self.hang_up()
        self.asked += 1
        prompt, told = [(self.asked + place) % 50 for place in range(40)], list[Any]()
        job = make_job(f"r{self.asked}", prompt, 8)
        request = PrefillRequest(job, self.decode.target)
        await self.client.prefill(self.prefill.loaded.lease(), request, told.append)
        assert [type(each) for each in told] == [FirstToken, ShipDone], told
        await until(lambda: any(delta.finish_reason for delta in self.deltas(job.request_id)))
        made = [*told[0].delta.token_ids, *(token for d in self.deltas(job.request_id) for token in d.token_ids)]
        assert made == expected(prompt, 8)

    def deltas(self, request_id: str) -> list[TokenDelta]:
        return [delta for frame in self.frames for delta in frame.deltas if delta.request_id == request_id]

    async def acknowledge(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            if self.frames:
                await self.client.seen(self.decode.loaded.lease(), self.frames[-1].number)

    async def hang_up(self) -> None:
        """The next ship greets anew."""
        loaded, dock, closed = self.prefill.loaded, self.prefill.service._base.dock, asyncio.Event()

        def drop() -> None:
            for peer in tuple(loaded.link._connections._peers):
                dock.drop(peer, TransferFailed("the test hangs up"))
            loaded.call_soon(closed.set)

        loaded.link.submit(drop)
        await asyncio.wait_for(closed.wait(), 15)


@asynccontextmanager
async def cluster_of(folder: Path) -> AsyncIterator[Cluster]:
    files = {name: folder / name for name in ("prefill", "decode", "router")}
    for file in files.values():
        file.write_text(OLD)
    async with (
        worker("prefill", make_engine(), cluster_secret_file=str(files["prefill"])) as prefill,
        worker("decode", make_engine(), cluster_secret_file=str(files["decode"])) as decode,
    ):
        secrets = ClusterSecrets(RouterSettings(cluster_secret_file=str(files["router"])))
        cluster, opened = Cluster(files, prefill, decode, secrets), asyncio.Event()
        async with secrets.followed():
            listens = cluster.client.stream(decode.loaded.lease(), None, opened.set, cluster.frames.append)
            tasks = [asyncio.create_task(listens), asyncio.create_task(cluster.acknowledge())]
            await asyncio.wait_for(opened.wait(), 15)
            yield cluster
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await cluster.client.aclose()


async def shown(node: Worker, secret: str) -> int:
    async with httpx.AsyncClient(trust_env=False) as http:
        headers = {HEADER: read_secrets(secret)[0].token}
        return (await http.post(f"{node.node.address.url}/attempts/cancel", headers=headers)).status_code


async def test_no_request_is_refused_while_the_secret_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "POLL_S", 0.02)
    async with cluster_of(tmp_path) as cluster:
        await cluster.serves()
        for text in STEPS:
            tokens = tuple(secret.token for secret in read_secrets(text))
            for name, file in cluster.files.items():
                file.write_text(text)
                await until(lambda name=name, tokens=tokens: cluster.known[name].tokens() == tokens)
                await cluster.serves()
        assert [await shown(cluster.decode, secret) for secret in (OLD, NEW)] == [403, 400]
        await cluster.prefill.settle()
        await cluster.decode.settle()


async def test_a_file_that_breaks_keeps_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_file, "POLL_S", 0.02)
    file = tmp_path / "secret"
    file.write_text(OLD)
    async with worker("decode", make_engine(), cluster_secret_file=str(file)) as node:
        for text in ("short", "", f"{NEW}\nshort"):
            file.write_text(text)
            await asyncio.sleep(0.2)
            assert node.node.address.secrets.token() == read_secrets(OLD)[0].token
        file.write_text(NEW)
        await until(lambda: node.node.address.secrets.token() == read_secrets(NEW)[0].token)

"""What each kind of fault does, to whom, and how it is taken back."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.chaos.engines import processes, send
from tests.chaos.load import Clients
from tests.chaos.plan import NODES, ROUTERS, Fault
from tests.chaos.stage import Stage

ARMED_S = 3.0
"""A process that is to be struck in mid-ship and ships nothing for so long is struck all the same."""


class Acts:
    """Every method commits one fault, and returns when it is taken back: what it has to tell of it, if anything. Raises
    OSError or httpx.HTTPError where it did not come about."""

    def __init__(self, stage: Stage, clients: Clients, seed: int) -> None:
        self._stage, self._clients, self._rng = stage, clients, random.Random(seed)

    async def _kill(self, fault: Fault) -> None:
        self._stage.signal(fault.target, signal.SIGKILL)
        await asyncio.sleep(0.2)

    async def _drain(self, fault: Fault) -> None:
        self._stage.signal(fault.target, signal.SIGTERM)
        await asyncio.sleep(0.5)

    async def _freeze(self, fault: Fault) -> None:
        self._stage.signal(fault.target, signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        with suppress(ProcessLookupError):
            self._stage.signal(fault.target, signal.SIGCONT)

    async def _kill_engine(self, fault: Fault) -> None:
        """All of its processes, as when its container is killed, or one that is not its first."""
        members = self._engine(fault)
        send(members if "part" not in fault.kind else [self._rng.choice(members[1:] or members)], signal.SIGKILL)
        await asyncio.sleep(0.2)

    async def _freeze_engine(self, fault: Fault) -> None:
        members = self._engine(fault)
        send(members, signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        send(members, signal.SIGCONT)

    def _engine(self, fault: Fault) -> list[psutil.Process]:
        pid = self._stage.pid(fault.target)
        if pid is None:
            raise ProcessLookupError(f"{fault.target} does not run")
        return processes(pid)

    async def _in_mid_ship(self, fault: Fault, number: int, then: Callable[[Fault], Awaitable[None]]) -> None:
        """The process strikes itself at a block of a ship; later this one strikes all the same."""
        pid = self._stage.pid(fault.target)
        await self._stage.order(fault.target, "at_block", blocks=int(fault.number), number=int(number))
        until = time.monotonic() + ARMED_S
        while time.monotonic() < until and not _struck(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if not (struck := _struck(pid)):
            with suppress(OSError):
                await self._stage.order(fault.target, "at_block", blocks=-1, number=0)
        if number == signal.SIGSTOP or not (struck or _struck(pid)):
            await then(fault)

    async def _kill_in_mid_ship(self, fault: Fault) -> None:
        await self._in_mid_ship(fault, signal.SIGKILL, self._kill)

    async def _freeze_in_mid_ship(self, fault: Fault) -> None:
        await self._in_mid_ship(fault, signal.SIGSTOP, self._freeze)

    async def _hang(self, fault: Fault) -> None:
        await self._stage.order(fault.target, "hang", thread=fault.kind.split()[1], seconds=fault.seconds)
        await asyncio.sleep(fault.seconds)

    async def _flush(self, fault: Fault) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._redis_port())
        writer.write(b"FLUSHALL\r\n")
        answer = await asyncio.wait_for(reader.readline(), 2)
        writer.close()
        if answer != b"+OK\r\n":
            raise OSError(f"flush: {answer!r}")

    def _redis_port(self) -> int:
        return int(self._stage.child("valkey").command.address.rsplit(":", 1)[1].split("/")[0])

    async def _cut_redis(self, fault: Fault) -> None:
        ways = self._stage.ways
        assert ways is not None
        ways.order(fault.target, "freeze" if "frozen" in fault.kind else "cut")
        await asyncio.sleep(fault.seconds)
        ways.order(fault.target, "heal")

    async def _sever(self, fault: Fault) -> None:
        await self._stage.order(fault.target, "sever")

    async def _weather(self, fault: Fault) -> None:
        what = {
            "link delay": {"delay_s": fault.number},
            "link loss": {"resent": fault.number},
            "lost messages": {"drop": fault.number},
            "link duplicates": {"duplicate": fault.number},
            "link corrupts": {"corrupt": fault.number},
            "slow link": {"block_s": fault.number},
        }[fault.kind]
        await self._stage.order(fault.target, "weather", seconds=fault.seconds, **what)
        await asyncio.sleep(fault.seconds)

    async def _leave(self, fault: Fault) -> None:
        await self._clients.leave(int(fault.number), self._rng)

    async def _crowd(self, fault: Fault) -> None:
        """More long prompts at once than the pools hold; its own clients stay for a second of their answers."""
        own = self._clients.bodies[0] | {"max_tokens": 200, "ignore_eos": True, "n": 1}
        shape = self._stage.shape
        count, length = math.ceil(fault.number * shape.crowd_share), round(1200 * shape.prompt_share)
        prompts = [self._rng.choices(range(3, 500), k=length) for _ in range(count)]

        async def one(prompt: list[int]) -> None:
            with suppress(Exception):
                async with asyncio.timeout(4.0):
                    await self._clients.ask(
                        self._rng.choice(ROUTERS), own | {"prompt": prompt, "stream": True}, lambda count: None
                    )

        await asyncio.gather(*map(one, prompts))

    async def _clock(self, fault: Fault) -> None:
        await self._stage.order(fault.target, "clock", offset_s=fault.number)
        if "kill" in fault.kind:
            await self._kill(fault)

    async def _full_disk(self, fault: Fault) -> str:
        """The router's directory becomes one that takes no more; a client that brings a file is told so."""
        folder = Path(self._stage.shape.home) / f"{fault.target}.data"
        blocked = await asyncio.create_subprocess_exec("mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder))
        if await blocked.wait():
            raise OSError("no mount here")
        try:
            async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
                url = f"{self._stage.urls[fault.target]}/v1/files"
                files: dict[str, Any] = {"file": ("rows.jsonl", b"{}\n" * 100_000), "purpose": (None, "batch")}
                response = await client.post(url, files=files)
            await asyncio.sleep(fault.seconds)
            return f"an upload got {response.status_code}"
        finally:
            back = await asyncio.create_subprocess_exec("umount", "-l", str(folder))
            await back.wait()

    async def _cut_off(self, fault: Fault) -> None:
        network = self._stage.network
        assert network is not None
        others = ["gateway", *(name for name in NODES if name != fault.target)]
        other = self._rng.choice(others)
        ways = {
            "cut off": (lambda on: network.cut(fault.target, on)),
            "half open": (lambda on: network.deaden(fault.target, other, on)),
            "cut pair": (lambda on: _part(network, fault.target, other, on)),
            "thin line": (lambda on: network.narrow(fault.target, fault.number if on else 0)),
        }
        ways[fault.kind](True)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            ways[fault.kind](False)


def _part(network: Any, name: str, other: str, on: bool) -> None:
    """Both directions, but for the gateway, which has no namespace: what it sends still arrives."""
    network.deaden(name, other, on)
    if other != "gateway":
        network.deaden(other, name, on)


def _struck(pid: int | None) -> bool:
    """Whether the process is stopped or gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "TZX"
    except OSError:
        return True


_KINDS: dict[Callable[[Acts, Fault], Awaitable[str | None]], tuple[str, ...]] = {
    Acts._kill: ("kill", "kill redis", "kill router"),
    Acts._kill_in_mid_ship: ("kill in mid-ship",),
    Acts._freeze: ("freeze", "freeze redis", "freeze router"),
    Acts._freeze_in_mid_ship: ("freeze in mid-ship",),
    Acts._hang: ("hang engine", "hang link", "hang loop"),
    Acts._drain: ("drain",),
    Acts._flush: ("flush redis",),
    Acts._cut_redis: ("cut from redis", "frozen way to redis"),
    Acts._sever: ("sever link",),
    Acts._weather: ("link delay", "link loss", "lost messages", "link duplicates", "link corrupts", "slow link"),
    Acts._leave: ("clients leave",),
    Acts._crowd: ("crowd",),
    Acts._clock: ("clock", "clock and kill"),
    Acts._full_disk: ("full disk",),
    Acts._kill_engine: ("kill engine", "kill part of engine"),
    Acts._freeze_engine: ("freeze engine",),
    Acts._cut_off: ("cut off", "half open", "cut pair", "thin line"),
}
ACTS = {kind: act for act, kinds in _KINDS.items() for kind in kinds}

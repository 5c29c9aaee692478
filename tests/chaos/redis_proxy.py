"""Ways to Redis, one for each process, any of which can be cut without anybody else's noticing. They run in a process
of their own: the load's event loop is late at times, and Redis is not to look slow for that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence

CHUNK = 1 << 16
START_S = 30.0


class RedisProxy:
    """Forwards bytes between its own port and the server's. `cut`: connections break and new ones are refused at once;
    `freeze`: what is sent goes nowhere, and nothing is said about it."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._open, self._flows = True, asyncio.Event()
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def start(self, host: str) -> None:
        self._server = await asyncio.start_server(self._accept, host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        self._open = False
        for writer in list(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        self._flows.clear()

    def heal(self) -> None:
        self._open = True
        self._flows.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flows.wait()
        if not self._open:
            writer.transport.abort()
            return
        try:
            onward, server = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, server}
        try:
            await asyncio.gather(self._copy(reader, server), self._copy(onward, writer))
        finally:
            self._writers -= {writer, server}
            for each in (writer, server):
                each.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


class Ways:
    """The process with a proxy for each name, as its owner holds it. Its orders are lines of JSON on its stdin."""

    def __init__(self, names: Sequence[str], host: str, server_port: int) -> None:
        argv = [sys.executable, __file__, host, str(server_port), *names]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self._process.stdout is not None
        self.ports: dict[str, int] = json.loads(self._process.stdout.readline())

    def order(self, name: str, deed: str) -> None:
        """cut, freeze or heal."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, deed]) + "\n")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


async def serve(host: str, server_port: int, names: Sequence[str]) -> None:
    """Tell the ports, then obey until stdin ends."""
    proxies = {name: RedisProxy(server_port) for name in names}
    for proxy in proxies.values():
        await proxy.start(host)
    print(json.dumps({name: proxy.port for name, proxy in proxies.items()}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, deed = json.loads(line)
        {"cut": RedisProxy.cut, "freeze": RedisProxy.freeze, "heal": RedisProxy.heal}[deed](proxies[name])
    os._exit(0)  # what is under way needs no end


if __name__ == "__main__":
    import uvloop

    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))

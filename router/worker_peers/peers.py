"""WorkerPeers: calls between the router processes of one port, over Unix sockets.

A call is a line of JSON with its name and arguments. Its answer ends with END and the end of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from kvferry.protocol.settings import RouterSettings

Answer = Callable[..., Awaitable[bytes]]
"""Handler of a call, with its arguments."""

ANSWER_S = 1.0
"""Default time for a peer's answer, in seconds; below the two seconds of a readiness probe."""

log = logging.getLogger(__name__)


class WorkerPeers:
    """Peers of router process `own` among `count`, with sockets in `folder`.

    A process registers handlers in `answers`, by the name that other processes pass to `call`."""

    def __init__(self, own: int = 0, count: int = 1, folder: str = "") -> None:
        self.own, self.count = own, count
        self.answers: dict[str, Answer] = {"alive": _alive}
        self._folder = Path(folder)

    @classmethod
    def of(cls, settings: RouterSettings) -> WorkerPeers:
        """Return the peers of the settings, which the supervising process writes."""
        if settings.worker < 0:
            return cls()
        return cls(settings.worker, settings.workers, settings.workers_dir)

    @property
    def alone(self) -> bool:
        """Return whether there are no other processes."""
        return self.count == 1

    def others(self) -> Iterator[int]:
        """Return the numbers of the other processes."""
        return (number for number in range(self.count) if number != self.own)

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Answer the peers' calls until the end of the block, replacing a stale socket."""
        if self.alone:
            yield
            return
        path = socket_path(self._folder, self.own)
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._answer, path)
        try:
            yield
        finally:
            server.close()

    async def call(self, name: str, *args: object, within_s: float = ANSWER_S) -> dict[int, bytes | None]:
        """Call all peers; None for one that does not answer."""
        numbers = list(self.others())
        calls = (call_peer(self._folder, number, name, *args, within_s=within_s) for number in numbers)
        return dict(zip(numbers, await asyncio.gather(*calls), strict=True))

    async def silent(self) -> list[int]:
        """Return the peers that do not answer."""
        return [number for number, answer in (await self.call("alive")).items() if answer is None]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name, *args = json.loads(await reader.readline())
            writer.write(await self.answers[name](*args) + END)
            await writer.drain()
        except (OSError, ValueError, KeyError) as error:
            log.warning("a call from another router process was not answered: %r", error)
        finally:
            writer.close()


END = b"\n."
"""End marker of an answer; without it the answer was truncated."""


async def call_peer(folder: Path, number: int, name: str, *args: object, within_s: float = ANSWER_S) -> bytes | None:
    """Call router process `number`; None if it does not answer within `within_s` seconds."""
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_unix_connection(socket_path(folder, number))
            with contextlib.closing(writer):
                writer.write(json.dumps([name, *args]).encode() + b"\n")
                answer = await reader.read(-1)
    except (OSError, TimeoutError):
        return None
    return answer.removesuffix(END) if answer.endswith(END) else None


def socket_path(folder: Path, number: int) -> Path:
    """Return the path of a process's socket."""
    return folder / f"{number}.sock"


async def _alive() -> bytes:
    return b""

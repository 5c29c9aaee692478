"""WorkerPeers: calls between the router processes of one port, over Unix sockets.

A question is a line of JSON with its name and arguments. The answer is everything until the connection ends, and
ends with END."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from kvferry.protocol.settings import RouterSettings

Answer = Callable[..., Awaitable[bytes]]
"""Handler of a question, called with its arguments."""

ASK_S = 1.0
"""Default time for a peer's answer, in seconds; below the two seconds of a readiness probe."""

log = logging.getLogger(__name__)


class WorkerPeers:
    """Peers of router process `own` among `count`, with sockets in `folder`.

    A process registers a handler in `answers` under the name by which others `ask` for it."""

    def __init__(self, own: int = 0, count: int = 1, folder: str = "") -> None:
        self.own, self.count = own, count
        self.answers: dict[str, Answer] = {"alive": _alive}
        self._folder = Path(folder)

    @classmethod
    def of(cls, settings: RouterSettings) -> WorkerPeers:
        """Build the peers that the supervising process announced."""
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
        """Answer the peers' questions until the end of the block, replacing a stale socket."""
        if self.alone:
            yield
            return
        path = place(self._folder, self.own)
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._answer, path)
        try:
            yield
        finally:
            server.close()

    async def ask(self, name: str, *words: object, within_s: float = ASK_S) -> dict[int, bytes | None]:
        """Ask all peers; None for one that does not answer."""
        numbers = list(self.others())
        asking = (ask(self._folder, number, name, *words, within_s=within_s) for number in numbers)
        return dict(zip(numbers, await asyncio.gather(*asking), strict=True))

    async def silent(self) -> list[int]:
        """Return the peers that do not answer."""
        return [number for number, answer in (await self.ask("alive")).items() if answer is None]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            name, *words = json.loads(await reader.readline())
            writer.write(await self.answers[name](*words) + END)
            await writer.drain()
        except (OSError, ValueError, KeyError) as error:
            log.warning("a call from another router process was not answered: %r", error)
        finally:
            writer.close()


END = b"\n."
"""End marker of an answer; without it the answer was truncated."""


async def ask(folder: Path, number: int, name: str, *words: object, within_s: float = ASK_S) -> bytes | None:
    """Ask router process `number`; None if it does not answer within `within_s` seconds."""
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_unix_connection(place(folder, number))
            with contextlib.closing(writer):
                writer.write(json.dumps([name, *words]).encode() + b"\n")
                answer = await reader.read(-1)
    except (OSError, TimeoutError):
        return None
    return answer.removesuffix(END) if answer.endswith(END) else None


def place(folder: Path, number: int) -> Path:
    """Return the path of a process's socket."""
    return folder / f"{number}.sock"


async def _alive() -> bytes:
    return b""

"""AsyncRenderChild: client of a child process that renders chat templates, for use on an event loop.

A thread starts the process. An event loop that forks a router stops for 0.4 s and more, since the kernel copies the
page tables of all its memory; `subprocess` shares them with the child until it runs its own program (vfork)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess

from kvferry.router.text.render_frames import COMMAND, LENGTH, framed, length_of, minimal_environment, parts_of


class AsyncRenderChild:
    """A running process (`render_process`), until `end`; it answers one request at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._ending = False

    @classmethod
    async def started(cls) -> AsyncRenderChild:
        """Start a process; raise OSError if that fails. Cancelled, it kills the process that the thread starts."""
        starting = asyncio.get_running_loop().run_in_executor(None, _start)
        try:
            process, ours = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_abandon)
            raise
        try:
            return cls(process, *await asyncio.open_unix_connection(sock=ours))
        except BaseException:
            _abandon(starting)
            raise

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return whether the process runs no longer."""
        return self._process.poll() is not None

    async def ask(self, content: bytes, longest: int) -> tuple[bytes, str]:
        """Return kind and text of the answer to a request; raise EOFError if there is none."""
        try:
            with contextlib.suppress(ConnectionError):
                self._writer.write(framed(content))
                await self._writer.drain()
            length = length_of(await self._reader.readexactly(LENGTH))
            if length > longest:
                raise EOFError
            return parts_of(await self._reader.readexactly(length))
        except (ConnectionError, ValueError):
            raise EOFError from None

    def end(self) -> bool:
        """Kill the process; return whether this is the first call, after which `reaped` must be awaited."""
        self._process.kill()
        first, self._ending = not self._ending, True
        return first

    async def reaped(self) -> None:
        """Wait until the killed process has ended."""
        self._writer.close()
        await asyncio.to_thread(self._process.wait)


def _abandon(starting: asyncio.Future[tuple[subprocess.Popen[bytes], socket.socket]]) -> None:
    """Kill a process that nobody waits for any longer, once it has started; it ends at once."""
    if starting.cancelled() or starting.exception():
        return
    process, ours = starting.result()
    process.kill()
    ours.close()
    process.wait()


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process; return it and our end of the socket that is its input and output. Raises OSError."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                COMMAND,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,  # an error may quote a prompt
                env=minimal_environment(),
                process_group=0,  # a terminal's interrupt reaches the router alone, and niceness counts
            )
        except OSError:
            ours.close()
            raise
    ours.setblocking(False)
    return process, ours

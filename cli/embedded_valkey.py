"""Embedded Valkey server of `kvferry serve`: only this user can reach it, over a Unix socket in a private folder.

A client that can write to it can redirect requests to other nodes, so it must not listen on a port that other users of
the machine can reach."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvferry.cli import preflight
from kvferry.cli.child import Command
from kvferry.protocol.errors import ConfigError

MAX_FOLDER_BYTES = 80
"""Maximum length of the folder's path, in bytes: the kernel limits that of a socket to 107."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Create a folder that only this user can enter, and remove it at the end."""
    parent = tempfile.gettempdir()
    if len(parent.encode()) > MAX_FOLDER_BYTES - 20:
        parent = "/tmp"  # noqa: S108 - the folder made there has mode 0700
    with tempfile.TemporaryDirectory(prefix="kvferry-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def valkey_command(folder: Path, log_level: str = "info") -> Command:
    """Return the command of an in-memory Valkey that listens only on a socket in `folder`.

    It is silent unless log_level is debug: its warnings concern persistence."""
    socket, loglevel = folder / "valkey.sock", "notice" if log_level == "debug" else "nothing"
    options = {
        "--port": 0, "--unixsocket": socket, "--unixsocketperm": 700, "--save": "", "--appendonly": "no",
        "--loglevel": loglevel, "--dir": folder,
    }  # fmt: skip
    words = [str(word) for option in options.items() for word in option]
    argv = (str(preflight.valkey_binary()), *words)
    return Command("valkey", argv, reports=False, ends_last=True, address=f"unix://{socket}")


async def until_valkey_answers(valkey: Command, tries: int = 100) -> None:
    """Wait until the server answers. Raises ConfigError."""
    for _ in range(tries):
        with contextlib.suppress(OSError):
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_unix_connection(valkey.address.removeprefix("unix://"))
                with contextlib.closing(writer):
                    writer.write(b"PING\r\n")
                    if await reader.readline() == b"+PONG\r\n":
                        return
        await asyncio.sleep(0.1)
    raise ConfigError("the embedded Valkey does not answer; give --redis-url")

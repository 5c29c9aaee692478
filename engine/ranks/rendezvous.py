"""Rendezvous of ranks that have a device each: the file or TCP store by which torch.distributed finds all ranks."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from kvferry.runtime.address import family_of, host_port, parse_host_port

_dist: Any = dist  # torch's stores have no type stubs
LOOPBACK = "127.0.0.1"


class Rendezvous(Protocol):
    """Rendezvous of one rank.

    address: where this rank listens for other ranks. where: the store's address, which rank 0 sends them. inherited:
    descriptors that rank 0 passes to the other ranks of its host."""

    address: str
    where: bytes
    inherited: tuple[int, ...]

    def store(self, rank: int, ranks: int, where: bytes, max_wait: timedelta) -> Any:
        """Return torch's store. where: rank 0's `where`."""

    def close(self) -> None:
        """Free the store's descriptor or socket. Called once the group is closed."""


class FileRendezvous:
    """Rendezvous of ranks of one host over an unlinked file: every process with its descriptor is a member.

    torch opens the file by its descriptor's number and writes to it again when a group ends. A rendezvous therefore
    keeps the descriptor open until it is closed itself: otherwise torch would write to any file that was given the same
    number, or fail if it is not a file.

    descriptor: of a file that is empty before the first rank connects, which the rendezvous owns from now on."""

    address, where = LOOPBACK, b""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.inherited: tuple[int, ...] = (descriptor,)

    def store(self, rank: int, ranks: int, where: bytes, max_wait: timedelta) -> Any:
        return _dist.FileStore(f"/proc/self/fd/{self._descriptor}", ranks)

    def close(self) -> None:
        os.close(self._descriptor)


class TcpRendezvous:
    """Rendezvous of ranks of several hosts over a TCP store, which rank 0 serves on a port that the kernel chooses.

    address: of this host. serves: whether this is rank 0, which binds the port at once. Raises OSError."""

    inherited: tuple[int, ...] = ()

    def __init__(self, address: str, *, serves: bool = False) -> None:
        self.address, self.where = address, b""
        self._listener: socket.socket | None = None
        if serves:
            self._listener = socket.create_server((address, 0), family=family_of(address)[0])
            self.where = host_port(address, self._listener.getsockname()[1]).encode()

    def store(self, rank: int, ranks: int, where: bytes, max_wait: timedelta) -> Any:
        host, port = parse_host_port(where.decode())
        options: dict[str, Any] = {"timeout": max_wait, "wait_for_workers": False}
        if self._listener is not None:
            options |= {"is_master": True, "master_listen_fd": self._listener.detach()}
            self._listener = None
        return _dist.TCPStore(host, port, ranks, **options)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

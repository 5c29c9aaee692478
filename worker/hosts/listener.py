"""Host 0's side of a node on several hosts: accepts connections of other hosts and ranks, and detects lost hosts."""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Sequence

import numpy as np

from kvferry.protocol.errors import ConfigError, Incompatible, reason
from kvferry.protocol.settings import WorkerSettings
from kvferry.runtime.cluster_secret import ClusterSecrets
from kvferry.runtime.log import RateLimitedLog
from kvferry.worker.hosts.join_message import HOST, JOIN_S, JoinMessage, terms
from kvferry.worker.hosts.sealed_socket import SealedSocket, answer, listen
from kvferry.worker.ranks import CALLS, MOVES

log = logging.getLogger("kvferry.worker")

LOST_S = 3.0
"""Seconds without a heartbeat after which a host is lost."""
MAX_JOINING = 32
"""Maximum number of concurrent handshakes; further connections are closed."""
LOADING, READY = b"loading", b"ready"
"""Host 0's answers to a heartbeat."""
Key = tuple[str, int]


class HostListener:
    """Connections of the other hosts and their ranks to host 0, by purpose and number.

    If a host is lost before all have joined, another one may take its place; after that, it is a fault of the node.

    heartbeats  int64, a heartbeat counter of each rank of other hosts
    ready       whether the node serves; sent to the other hosts
    leaving     whether another host was asked to stop
    revision    revision of the model's weights

    Raises ConfigError if the port is taken."""

    def __init__(self, settings: WorkerSettings, revision: str) -> None:
        self.fault, self.ready, self.leaving = "", False, False
        self.hosts: dict[int, JoinMessage] = {}
        self._settings, self._first = settings, settings.ranks_per_host
        self.heartbeats = np.zeros(settings.tensor_parallel_size - self._first, np.int64)
        self._terms = terms(settings, ClusterSecrets(settings), revision)
        self._token, self._all_joined = secrets.token_hex(16), False
        self._lines: dict[Key, SealedSocket | None] = {}
        self._changed = threading.Condition()
        self._joining, self._refused = threading.BoundedSemaphore(MAX_JOINING), RateLimitedLog(log)
        try:
            self._socket = listen(settings.host, settings.master_port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen for the other hosts on {settings.host} port {settings.master_port}: {error.strerror}; "
                "choose another --master-port",
                param="master_port",
            ) from error
        threading.Thread(target=self._accept, name="hosts", daemon=True).start()

    def meet(self, within_s: float = JOIN_S) -> None:
        """Wait until all other hosts have joined. Raises ConfigError."""
        others = range(1, self._settings.nnodes)
        log.info("waiting for %d other hosts on port %d", len(others), self._settings.master_port)
        self._wait([(HOST, number) for number in others], within_s)

    def ranks(self, purpose: str, within_s: float = JOIN_S) -> list[SealedSocket]:
        """Return the connections of all ranks on other hosts for one purpose, once they exist. Raises ConfigError."""
        others = range(self._first, self._settings.tensor_parallel_size)
        return self._wait([(purpose, rank) for rank in others], within_s)

    def close(self) -> None:
        """Stop listening and close all connections; the other hosts then end."""
        with self._changed:
            self.fault = self.fault or "this host ends"
            lines = [line for line in self._lines.values() if line is not None]
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for line in lines:
            line.close()

    def _wait(self, keys: Sequence[Key], within_s: float) -> list[SealedSocket]:
        deadline = time.monotonic() + within_s
        with self._changed:
            while missing := [key for key in keys if self._lines.get(key) is None]:
                if self.fault:
                    raise ConfigError(self.fault, param="nnodes")
                if not self._changed.wait(deadline - time.monotonic()):
                    names = ", ".join(map(_named, missing))
                    raise ConfigError(f"these have not joined within {within_s:.0f} s: {names}", param="nnodes")
            self._all_joined = True
            return [line for key in keys if (line := self._lines[key]) is not None]

    def _accept(self) -> None:
        while True:
            try:
                connection, (where, *_) = self._socket.accept()
            except OSError:
                return
            if self._joining.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(connection, where), daemon=True).start()
            else:
                connection.close()

    def _greet(self, connection: socket.socket, where: str) -> None:
        taken: list[Key] = []
        try:
            line, data = answer(connection, self._terms, lambda data: self._placed(data, taken))
        except (OSError, EOFError, Incompatible) as error:
            self._refused.warning("refusing a connection of %s for --nnodes: %s", where, reason(error))
            with self._changed:
                for key in taken:
                    self._lines.pop(key, None)
            return
        finally:
            self._joining.release()
        (key,) = taken
        with self._changed:
            if key not in self._lines:  # its host was lost meanwhile
                line.close()
                return
            self._lines[key] = line
            if key[0] == HOST:
                self.hosts[key[1]] = JoinMessage.decode(data)
            self._changed.notify_all()
        if key[0] == HOST:
            log.info("host %d has joined from %s", key[1], where)
            self._watch(key[1], line)

    def _placed(self, data: bytes, taken: list[Key]) -> bytes:
        """Reserve the place of the host or rank that joins, and return this host's join message."""
        given, settings = JoinMessage.decode(data), self._settings
        key = (given.purpose, given.number)
        places = range(1, settings.nnodes)
        if given.purpose in (CALLS, MOVES):
            places = range(self._first, settings.tensor_parallel_size)
            if given.meeting != self._token:
                raise Incompatible("this rank belongs to an earlier start of the node")
        elif given.purpose != HOST:
            raise Incompatible("a connection of unknown purpose")
        if given.number not in places:
            raise Incompatible(f"there is no place for a {_named(key)}")
        with self._changed:
            if key in self._lines:
                raise ConnectionRefusedError(f"{_named(key)} has joined already")
            self._lines[key] = None
            taken.append(key)
        return JoinMessage(HOST, 0, meeting=self._token).encode()

    def _watch(self, number: int, line: SealedSocket) -> None:
        """Receive a host's heartbeats until it is lost."""
        own = self.heartbeats[(number - 1) * self._first : number * self._first]
        line.limit(LOST_S)
        try:
            while True:
                found = json.loads(line.recv_bytes())
                if wrong := found.get("ended"):
                    raise EOFError(wrong)
                own[:] = found["signs"]
                self.leaving |= found["leaving"]
                line.send_bytes(READY if self.ready else LOADING)
        except TimeoutError:
            self._lost(number, f"has not sent a heartbeat for {LOST_S:.0f} s")
        except EOFError as error:
            self._lost(number, f"has ended{f': {error}' if str(error) else ''}")
        except Exception as error:
            self._lost(number, f"has failed: {reason(error)}")

    def _lost(self, number: int, how: str) -> None:
        """End all of the host's connections, so that nothing waits for it; `fault` is set before that."""
        with self._changed:
            message = f"host {number} ({self.hosts[number].address}) {how}"
            own = [key for key in self._lines if (key[1] if key[0] == HOST else key[1] // self._first) == number]
            lines = [self._lines[key] for key in own]
            if self._all_joined:
                self.fault = self.fault or message
            else:
                log.warning("%s before all hosts have joined", message)
                for key in own:
                    del self._lines[key]
            self._changed.notify_all()
        for line in lines:
            if line is not None:
                line.shut()


def _named(key: Key) -> str:
    purpose, number = key
    return f"{'host' if purpose == HOST else 'rank'} {number}"

"""Real Valkey servers and Sentinels as child processes, at ports that the kernel chose; what can befall them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis

from kvferry.cli.preflight import valkey_binary
from tests.waiting import wait_for

LOOPBACK = "127.0.0.1"
MASTER = "kv"
DOWN_AFTER_MS = 700


def free_ports(count: int) -> list[int]:
    """Free just now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [probe.getsockname()[1] for probe in probes]


class RedisServer:
    """One process, started with these words of its configuration, that keeps nothing on disk. Started again by `start`
    it is at the same port, and empty."""

    def __init__(self, port: int, *words: str, folder: Path | None = None, conf: Sequence[str] = ()) -> None:
        self.port, self._words, self._conf = port, words, conf
        self._made = tempfile.mkdtemp(prefix="kvferry-") if folder is None else str(folder)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=2, **options)  # type: ignore[arg-type]

    def start(self) -> None:
        argv = [str(valkey_binary())]
        if self._conf:
            path = Path(self._made) / f"{self.port}.conf"
            path.write_text("\n".join((f"port {self.port}", f"bind {LOOPBACK}", f"dir {self._made}", *self._conf)))
            argv += [str(path), *self._words]
        else:
            argv += ["--port", str(self.port), "--bind", LOOPBACK, "--save", "", "--dir", self._made, *self._words]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._listens, 10)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """As the kernel would, with nothing said to anybody; returns when it is gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._made, ignore_errors=True)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), timeout=1):
            return True
        return False


@contextlib.contextmanager
def redis_server(*words: str) -> Iterator[RedisServer]:
    server = RedisServer(free_ports(1)[0], *words)
    try:
        yield server
    finally:
        server.close()


class Watched:
    """A master, a replica and three Sentinels that watch them. `servers` are the two, whatever they are just now."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        first, second, *watching = free_ports(5)
        self.servers = {first: self._started(first)}
        self.servers[second] = self._started(
            second, "--replicaof", LOOPBACK, str(first), "--repl-diskless-sync-delay", "0"
        )
        replica = self.servers[second].client()
        wait_for(lambda: replica.info("replication")["master_link_status"] == "up", 20)
        conf = (
            f"sentinel monitor {MASTER} {LOOPBACK} {first} 2",
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {MASTER} 4000",
            f"sentinel known-replica {MASTER} {LOOPBACK} {second}",
        )
        self.sentinels = []
        for port in watching:  # they know each other from the start: finding out takes them seconds
            others = [
                f"sentinel known-sentinel {MASTER} {LOOPBACK} {other} {other:040}"
                for other in watching
                if other != port
            ]
            words = (f"sentinel myid {port:040}", *conf, *others)
            self.sentinels.append(self._started(port, "--sentinel", conf=words))
        self.url = f"redis+sentinel://{','.join(f'{LOOPBACK}:{port}' for port in watching)}/{MASTER}"
        wait_for(self._settled, 20)

    @property
    def master(self) -> RedisServer:
        """Whom the first Sentinel that answers names."""
        for sentinel in self.sentinels:
            with contextlib.suppress(redis.RedisError):
                told: Any = sentinel.client().sentinel_master(MASTER)
                return self.servers[int(told["port"])]
        raise AssertionError("no Sentinel answers")

    def _settled(self) -> bool:
        """Each Sentinel knows the other two and the replica."""
        known: list[Any] = [sentinel.client().sentinel_master(MASTER) for sentinel in self.sentinels]
        return all(one["num-other-sentinels"] == 2 and one["num-slaves"] == 1 for one in known)

    def _started(self, port: int, *words: str, conf: Sequence[str] = ()) -> RedisServer:
        server = RedisServer(port, *words, conf=conf)
        self._stack.callback(server.close)
        return server


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    with contextlib.ExitStack() as stack:
        yield Watched(stack)
